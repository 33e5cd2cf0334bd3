"""The command `torchperf`."""
