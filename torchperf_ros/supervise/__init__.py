"""Shared memory, the protocol between the two processes, and the actors that keep every deadline."""
