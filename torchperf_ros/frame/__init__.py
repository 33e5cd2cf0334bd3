"""The rules of answering one frame: no ROS, no torch, the clock is an argument."""
