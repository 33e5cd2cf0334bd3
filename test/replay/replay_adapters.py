"""Adapters for replayed stages: small, exact, and doing what a frame's `header.frame_id` says.

Imported by worker processes, which find this folder on PYTHONPATH. Words of a frame: raise, nan, bad_input,
sigkill, sleep (for a tenth of a second), print (what looks like markup).
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import message_class

POINT = "geometry_msgs/msg/PointStamped"
TIER_OFFSET = 1000.0


class _Offset(torch.nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, x):
        return x + self.offset


class Counting(Adapter):
    """Gives the point back.

    X plus 1000 times the tier's number, y: how many frames were observed, z: unchanged.
    """

    inputs = {"point": POINT}
    output = POINT
    tiers = ("full", "fast")

    def __init__(self, options, device):
        self._observed = 0
        if "inputs" in options:
            self.inputs = options["inputs"]

    def build(self, tier):
        return _Offset(TIER_OFFSET * self.tiers.index(tier))

    def example_inputs(self, tier):
        return (torch.zeros(1, dtype=torch.float64),)

    def observe(self, messages):
        self._observed += 1

    def preprocess(self, messages):
        message = next(iter(messages.values())).message
        word = message.header.frame_id
        if word == "raise":
            raise RuntimeError("as ordered")
        if word == "bad_input":
            raise BadInput("as ordered")
        if word == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "print":
            print("[/INST]", flush=True)
        if word == "sleep":
            time.sleep(0.1)
        return (torch.tensor([float("nan") if word == "nan" else message.point.x], dtype=torch.float64),)

    def postprocess(self, outputs, messages):
        message = next(iter(messages.values())).message
        point = message_class("geometry_msgs/msg/Point")(
            float(outputs[0]), float(self._observed), message.point.z
        )
        return message_class(POINT)(header=message.header, point=point)


class _Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.rand(()))

    def forward(self, x):
        return x + self.offset + torch.rand(())


class Drawing(Counting):
    """Draws at random: the model's weights, what it adds to x, and z."""

    def build(self, tier):
        return _Noisy()

    def postprocess(self, outputs, messages):
        message = super().postprocess(outputs, messages)
        message.point.z = random.random() + np.random.random()
        return message


class _Refined(_Offset):
    def forward(self, x):
        return super().forward(x) + 4

    def steps(self, x):
        for step in range(1, 5):
            yield super().forward(x) + step


class Stepping(Counting):
    """An anytime model: x plus 1, 2, 3 and 4."""

    anytime = True

    def build(self, tier):
        return _Refined(TIER_OFFSET * self.tiers.index(tier))


class Joining(Counting):
    """Takes the first stage's points and, if there are, the latest of another topic: z is that one's x."""

    inputs = {"first": POINT, "other": POINT}

    def preprocess(self, messages):
        return (torch.tensor([messages["first"].message.point.x], dtype=torch.float64),)

    def postprocess(self, outputs, messages):
        other = messages.get("other")
        message = super().postprocess(outputs, messages)
        message.point.z = -1.0 if other is None else other.message.point.x
        return message


class Blinking(Counting):
    """Takes a type that no installed package has, only the log."""

    inputs = {"blinker": "robot_of_one/msg/Blinker"}

    def preprocess(self, messages):
        return (torch.tensor([float(messages["blinker"].message.side)], dtype=torch.float64),)

    def postprocess(self, outputs, messages):
        header = messages["blinker"].message.header
        point = message_class("geometry_msgs/msg/Point")(x=float(outputs[0]), y=0.0, z=0.0)
        return message_class(POINT)(header=header, point=point)


class NeverBuilt(Counting):
    """Says what it takes and gives, and then builds for ever."""

    def build(self, tier):
        time.sleep(3600.0)


class Obedient(Counting):
    """Notes its process in a folder.

    More words: `slow`: takes 0.1 s. `lose`: kills the process that replays. `lose once`: the first worker
    does.
    """

    def __init__(self, options, device):
        super().__init__(options, device)
        self._folder = Path(options["folder"])
        (self._folder / f"pid-{os.getpid()}").touch()
        # behind the stage's fork server and its base; looked up now, as another worker may have killed it
        # by then, and then whoever takes in orphans stands in its place: the process of these tests
        self._replaying = psutil.Process().parents()[2]

    def preprocess(self, messages):
        word = messages["point"].message.header.frame_id
        if word == "slow":
            (self._folder / "slow").touch()
            time.sleep(0.1)
        if word == "lose" or (word == "lose once" and self._first()):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._replaying.kill()
            time.sleep(60)  # until the kernel takes this process, too
        return super().preprocess(messages)

    def _first(self):
        try:
            (self._folder / "lost").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
