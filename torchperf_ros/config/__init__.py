"""The node's parameters, declared once, and message types."""
