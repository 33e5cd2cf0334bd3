"""Adapters for `torchperf check-model`: one that works, and some that do not."""

import torch
from torch import nn

from torchperf_ros.worker.adapter import Adapter


class Small(Adapter):
    inputs = {"image": "sensor_msgs/msg/Image"}
    output = "sensor_msgs/msg/Image"

    def __init__(self, options, device):
        self.channels = options.get("channels", 4)

    def build(self, tier):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, self.channels, 3), nn.BatchNorm2d(self.channels)).eval()

    def example_inputs(self, tier):
        return (torch.zeros(1, 3, 8, 8),)

    def preprocess(self, messages):
        raise NotImplementedError

    def postprocess(self, outputs, messages):
        raise NotImplementedError


class NotBuilt(Small):
    def build(self, tier):
        raise KeyError(tier)


class NoModule(Small):
    def build(self, tier):
        return "weights.pt"


class WrongExample(Small):
    def example_inputs(self, tier):
        return (torch.zeros(1, 4, 8, 8),)
