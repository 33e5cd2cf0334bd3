"""New versions onto vehicles: signed plans, who gets what, verdicts, and the way back; no torch, no rclpy."""
