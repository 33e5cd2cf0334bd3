"""The command `torchperf`, and what it does for a model before it drives: check, inspect, tune, compile, demo."""
