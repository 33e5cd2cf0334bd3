"""Measurements of the numbers that the design promises; `./run bench` lists them."""
