"""Logs in, the same workers as live, outputs and verdicts out."""
