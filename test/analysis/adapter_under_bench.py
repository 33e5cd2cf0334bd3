"""An adapter for `torchperf bench model` whose tiers are what can go right and wrong."""

import os
import signal
import time

import torch
from torch import nn

from torchperf_ros.worker.adapter import Adapter


class Fixed(nn.Linear):
    def forward(self, x, state):
        if x.shape[0] > 4:
            raise ValueError("no more than 4 at once")
        return {"y": super().forward(x) + state.sum()}


class Bench(Adapter):
    inputs = {"x": "std_msgs/msg/Float64"}
    output = "std_msgs/msg/Float64"

    def __init__(self, options, device):
        self.dims = {0: {0: tuple(options["batches"])}} if "batches" in options else {}

    def build(self, tier):
        if tier == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if tier == "hangs":
            time.sleep(60)
        if tier == "raises":
            raise RuntimeError("no weights")
        if tier == "none":
            return None
        torch.manual_seed(0)
        return Fixed(8, 8)

    def example_inputs(self, tier):
        return torch.randn(1, 8), torch.zeros(3)  # the second has no batch

    def dynamic_dims(self):
        return self.dims

    def preprocess(self, messages):
        raise NotImplementedError

    def postprocess(self, outputs, messages):
        raise NotImplementedError
