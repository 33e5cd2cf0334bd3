"""The node process: the only place that imports rclpy."""
