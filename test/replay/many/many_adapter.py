"""An adapter whose frames' `frame_id` says what is to happen to the replay; imported by worker processes."""

import os
import signal
import time
from pathlib import Path

import torch

from torchperf_ros.worker.adapter import Adapter

POINT = "geometry_msgs/msg/PointStamped"


class Same(torch.nn.Module):
    def forward(self, x):
        return x


class Obedient(Adapter):
    """Answers a point with itself; notes its process in a folder.

    `slow`: takes 0.1 s. `lose`: kills the process that replays. `lose once`: the first worker that comes to it does.
    """

    inputs = {"point": POINT}
    output = POINT

    def __init__(self, options, device):
        self._folder = Path(options["folder"])
        (self._folder / f"pid-{os.getpid()}").touch()

    def build(self, tier):
        return Same()

    def example_inputs(self, tier):
        return (torch.zeros(1),)

    def preprocess(self, messages):
        message = messages["point"].message
        orders = message.header.frame_id
        if orders == "slow":
            (self._folder / "slow").touch()
            time.sleep(0.1)
        if orders == "lose" or (orders == "lose once" and self._first()):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # until the kernel takes this process, too
        return (torch.tensor([float(message.point.x)]),)

    def postprocess(self, outputs, messages):
        return messages["point"].message

    def _first(self):
        try:
            (self._folder / "lost").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
