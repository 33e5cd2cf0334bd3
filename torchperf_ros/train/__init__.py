"""Training of the reference models from the closed loop's world, and what they score."""
