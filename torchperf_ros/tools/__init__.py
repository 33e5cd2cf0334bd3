"""The command `torchperf`, and what it does before a model drives: check, inspect, tune, compile, demo."""
