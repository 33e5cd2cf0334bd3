"""What keeps a vehicle safe whatever the models do.

Guard, emergency lane, scenes; pure rules, no ROS, no torch.
"""
