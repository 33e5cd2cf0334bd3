"""The live view of a running node."""
