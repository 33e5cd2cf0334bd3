"""PyTorch perception and planning in a vehicle: an answer for every frame by its deadline."""

__version__ = "0.1.0"
