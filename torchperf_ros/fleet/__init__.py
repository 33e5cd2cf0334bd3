"""New versions onto vehicles.

Signed plans, who gets what, verdicts, and the way back; no torch, no rclpy.
"""
