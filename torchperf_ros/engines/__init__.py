"""The ways to run a model: eager, compile, packages; shapes, parity. Imports torch."""
