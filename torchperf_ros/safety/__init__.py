"""What keeps a vehicle safe whatever the models do; pure rules, without ROS and without torch."""
