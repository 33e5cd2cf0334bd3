"""`python -m torchperf_ros.cli` is `torchperf`."""

from torchperf_ros.cli.main import app

app()
