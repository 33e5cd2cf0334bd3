"""What the benchmarks share.

A camera, an onlooker, the two nodes that are compared, and how figures are written.
"""
