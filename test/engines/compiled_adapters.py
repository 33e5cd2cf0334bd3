"""Adapters whose models are compiled, in this process and in others."""

import torch

from torchperf_ros.model.adapter import Adapter


class Mixed(torch.nn.Module):
    """Outputs of every kind: nested, integers, one of the inputs as it came, empty, half precision."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 5))

    def forward(self, x, mask):
        hidden = self.layers(x) * mask.sum(1, keepdim=True)
        return {"scores": hidden, "best": (hidden.argmax(-1), x), "none": hidden[:, :0], "half": hidden.half()}


class Untraceable(Mixed):
    def forward(self, x, mask):
        return super().forward(x, mask) if bool(x.sum() > 0) else super().forward(-x, mask)


class Counting(torch.nn.Module):
    """It keeps a number of its own from call to call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        self.calls[0] += 1.0
        return self.layer(x) + self.calls


class Compiled(Adapter):
    """Options: `dynamic` (both inputs' batch, 1 to 8, the example's is 1), `seed` of the weights, null: none."""

    inputs = {"image": "std_msgs/msg/String"}
    output = "std_msgs/msg/String"
    kinds = {"full": (Mixed, 16), "fast": (Mixed, 4), "untraceable": (Untraceable, 4)}

    def __init__(self, options, device):
        self.options = options

    def build(self, tier):
        seed = self.options.get("seed", 0)
        if seed is not None:
            torch.manual_seed(seed)
        kind, width = self.kinds[tier]
        return kind(width)

    def example_inputs(self, tier):
        return torch.zeros(1, 4), torch.tensor([[0, 1, 2]])

    def dynamic_dims(self):
        return {0: {0: (1, 8)}, 1: {0: (1, 8)}} if self.options.get("dynamic") else {}

    preprocess = postprocess = None  # no frame comes
