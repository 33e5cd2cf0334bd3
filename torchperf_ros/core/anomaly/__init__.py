"""Streaming anomaly detectors for any time series: each sample is seen once, memory and time per sample are bounded."""
