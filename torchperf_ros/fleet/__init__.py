"""New versions onto vehicles.

Signed plans, which vehicle gets what, verdicts, and the way back; no torch, no rclpy.
"""
