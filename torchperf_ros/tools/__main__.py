"""`python -m torchperf_ros.tools` is `torchperf`."""

from torchperf_ros.tools.main import app

app()
