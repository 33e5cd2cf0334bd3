"""Recorded logs: read, written, played."""
