"""Roads, vehicles and detections, drawn by a seed, for the benchmarks of guard and lane."""
