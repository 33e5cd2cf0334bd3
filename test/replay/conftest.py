import os
import shutil
import signal
from pathlib import Path

import pytest

from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.stage.wiring import StageInput

from .logs.small_logs import rosbag2

POINT = "geometry_msgs/msg/PointStamped"
S, MS = 1_000_000_000, 1_000_000
START_NS = 1_700_000_000 * S


@pytest.fixture(scope="session", autouse=True)
def _adapters_can_be_imported_by_workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture
def ctrl_c_at_the_16th(monkeypatch, request):
    """Ctrl-C, or another signal, comes while a stage is given its 16th message."""
    given, receive = [], StageInput.receive

    def interrupted(self, data):
        given.append(data)
        if len(given) == 16:
            signal.raise_signal(getattr(request, "param", signal.SIGINT))
        receive(self, data)

    monkeypatch.setattr(StageInput, "receive", interrupted)


def point(stamp_ns, x=0.0, word="", z=0.0):
    """CDR bytes of a `PointStamped`; its `frame_id` is a word for `replay_adapters`."""
    place = empty_message("geometry_msgs/msg/Point", x=x, z=z)
    return bytes(encode(empty_message(POINT, header=header(stamp_ns, word), point=place), POINT))


def write_points(folder, messages):
    """A rosbag2 folder of (topic, received ns, CDR bytes) of points."""
    return rosbag2(folder, entries=[(topic, POINT, data, t_ns) for topic, t_ns, data in messages])


def drive(frames, *, period_ms=40, age_ms=2, words=None):
    """Messages of `/point`, every `period_ms`, received `age_ms` after their stamp.

    `words` by number of the frame.
    """
    messages = []
    for number in range(frames):
        stamp_ns = START_NS + number * period_ms * MS
        data = point(stamp_ns, float(number), (words or {}).get(number, ""))
        messages.append(("/point", stamp_ns + age_ms * MS, data))
    return messages


def write_drive(path, word="", frames=10):
    """A rosbag2 folder, or an `.mcap` file, of points every 20 ms that all carry a word."""
    messages = drive(frames, period_ms=20, words=dict.fromkeys(range(frames), word))
    if path.suffix != ".mcap":
        return write_points(path, messages)
    folder = write_points(path.with_name(f".{path.stem}"), messages)
    next(folder.glob("*.mcap")).rename(path)
    shutil.rmtree(folder)
    return path


def one_stage(**own):
    """Parameters by dotted name of one stage that counts."""
    values = {
        "adapter": "replay_adapters:Counting",
        "output": "counted",
        "tiers": ["full", "fast"],
        "engine": "eager",
        "budget_ms": 30.0,
        "backup": "none",
        **own,
    }
    return {"stages": ["first"], "worker_threads": 1} | {
        f"first.{key}": value for key, value in values.items()
    }


def two_stages(first=None, second=None):
    """Parameters of a stage that counts, and one that joins its output with `/other`."""
    joining = {
        "adapter": "replay_adapters:Joining",
        "output": "joined",
        "tiers": ["full", "fast"],
        "engine": "eager",
        "budget_ms": 30.0,
        "backup": "none",
        **(second or {}),
    }
    values = one_stage(output="first", **(first or {})) | {"stages": ["first", "second"]}
    return values | {f"second.{key}": value for key, value in joining.items()}
