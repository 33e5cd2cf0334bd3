"""How many logs are to be replayed side by side."""

import re
from dataclasses import dataclass
from pathlib import Path

from torchperf_ros.core.errors import ConfigError

_SCHEMES = ("tcp://", "tls://")
_ADDRESS = re.compile(r"(?:(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.%\w]+\])?:)?(?P<port>\d{1,5})")
_LAST_PORT = 65535


@dataclass(frozen=True)
class ManyOptions:
    """What `torchperf replay` takes besides for several logs.

    Attributes:
        folder: where the results go, a folder for each log; made if it is not there.
        workers: so many logs at a time; 0: as `default_workers` says.
        scheduler: address of a Dask scheduler, for example `tcp://10.0.0.5:8786`; "": a cluster on this machine.
        retries: how often a log is tried again after a worker was lost or something failed that may not fail again.
        timeout_s: how long a log may take; 0: as long as it needs.
        fresh: replay what is done already, too.
        keep_output: write what was published to an MCAP file beside each log's results.
        dashboard: address of Dask's dashboard, for example `:8787`; "": none.
        worst: so many logs are shown in detail on the page.
    """

    folder: Path
    workers: int = 0
    scheduler: str = ""
    retries: int = 1
    timeout_s: float = 0.0
    fresh: bool = False
    keep_output: bool = False
    dashboard: str = ""
    worst: int = 8

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ConfigError: one is not allowed.
        """
        for name, value in (("workers", self.workers), ("retries", self.retries), ("timeout", self.timeout_s)):
            if value < 0:
                msg = f"--{name} {value}: has to be 0 or more"
                raise ConfigError(msg)
        if self.scheduler and not self.scheduler.startswith(_SCHEMES):
            msg = f"--scheduler {self.scheduler}: has to be an address like tcp://10.0.0.5:8786"
            raise ConfigError(msg)
        if self.dashboard:
            match = _ADDRESS.fullmatch(self.dashboard)
            if match is None or int(match["port"]) > _LAST_PORT:
                msg = f"--dashboard {self.dashboard}: has to be HOST:PORT or :PORT, for example :8787"
                raise ConfigError(msg)
        if self.folder.exists() and not self.folder.is_dir():
            msg = f"--output {self.folder}: is a file; for several logs it has to be a folder"
            raise ConfigError(msg)
