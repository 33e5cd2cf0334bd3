"""Tests that users write: the pytest plugin, and what counts as the same output."""
