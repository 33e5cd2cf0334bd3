"""The lifecycle node: imports rclpy."""
