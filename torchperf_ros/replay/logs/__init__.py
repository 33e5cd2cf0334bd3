"""Recorded logs of every kind, sound and broken, as one stream of messages."""
