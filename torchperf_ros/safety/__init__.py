"""What keeps a vehicle safe whatever the models do: guard, emergency lane, scenes; pure rules, no ROS, no torch."""
