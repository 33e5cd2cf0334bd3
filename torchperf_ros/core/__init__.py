"""Rules: no ROS, no torch, the clock is an argument."""
