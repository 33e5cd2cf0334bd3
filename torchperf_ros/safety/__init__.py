"""What keeps a vehicle safe when the models fail.

Guard, emergency lane, scenes; pure rules, no ROS, no torch.
"""
