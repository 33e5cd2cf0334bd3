"""The node's parameters, declared once; parameter files; rules across parameters."""
