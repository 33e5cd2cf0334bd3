"""Replays on a virtual clock."""
