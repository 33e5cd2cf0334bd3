"""Reference adapters and networks."""
