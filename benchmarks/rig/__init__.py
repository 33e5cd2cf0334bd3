"""What the benchmarks share: a camera, an onlooker, the two nodes that are compared, and how figures are written."""
