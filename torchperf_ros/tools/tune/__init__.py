"""The search for the fastest way to run a model."""
