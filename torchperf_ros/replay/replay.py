"""One log through the stages: the entry point of everything that replays."""

from collections.abc import Callable
from pathlib import Path

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_result import ReplayResult

Progress = Callable[[int, int], None]
"""Told how much of how much of the log's time has been replayed, in ns."""


class ReplayError(TorchperfError):
    """A log cannot be replayed with these parameters; the message says why and what would do."""


def replay(
    log: Path,
    options: ReplayOptions,
    progress: Progress = lambda _done, _total: None,
    say: Callable[[str], None] = lambda _: None,
) -> ReplayResult:
    """Replay a log.

    Args:
        log: a rosbag2 folder, an `.mcap` or `.db3` file, or a ROS 1 `.bag`.
        options: how.
        progress: told how far it is.
        say: told in one line of what people should know: damage in the log, a worker that died.

    Raises:
        LogError: nothing of the log can be read, or it lacks a topic that a stage needs.
        ConfigError: a parameter is not allowed.
        ReplayError: a stage cannot run.
        OSError: the output cannot be written.
    """
    raise NotImplementedError
