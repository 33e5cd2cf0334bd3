"""Adapters whose models are compiled, in this process and in others."""

import torch
from torch.utils import _pytree as pytree

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.engines import file_engines


class Mixed(torch.nn.Module):
    """Outputs of every kind: nested, integers, one of the inputs as it came, empty, half precision."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 5)
        )

    def forward(self, x, mask):
        hidden = self.layers(x) * mask.sum(1, keepdim=True)
        return {
            "scores": hidden,
            "best": (hidden.argmax(-1), x),
            "none": hidden[:, :0],
            "half": hidden.half(),
        }


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


class Sign(torch.nn.Module):
    """It looks at values, so that it cannot be exported."""

    def forward(self, x, mask):
        return {"scores": x * mask.sum(1, keepdim=True) if bool(x.sum() > 0) else -x}


class Split(torch.nn.Module):
    """A part that exports before one that does not."""

    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)
        )
        self.head = Sign()

    def forward(self, x, mask):
        return self.head(self.body(x), mask)


class Seeing(torch.nn.Module):
    """Convolutions with a shortcut, a transposed one, which nothing quantises, and a layer behind them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(count, 16, 3, padding=1) for count in (3, 16))
        self.up, self.head = torch.nn.ConvTranspose2d(16, 4, 2, stride=2), torch.nn.Linear(16, 4)

    def forward(self, image):
        x = self.first(image).relu()
        x = (x + self.second(x)).relu()
        return self.up(x), self.head(x.permute(0, 2, 3, 1))


class Sees(Adapter):
    """Its frames have larger values than its example.

    Options: `loss`, what its task says of all but eager.
    """

    inputs = {"image": "std_msgs/msg/String"}
    output = "std_msgs/msg/String"
    judged = 5

    def __init__(self, options, device):
        self.options = options

    def build(self, tier):
        torch.manual_seed(0)
        return Seeing()

    def example_inputs(self, tier):
        return (torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)

    def score_inputs(self, tier):
        return [
            (40.0 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed)),)
            for seed in (2, 3)
        ]

    def training_task(self, log):
        return self if "loss" in self.options else None

    def judge(self, call, seed, count, device):
        eager = isinstance(call, torch.nn.Module)
        return {"map": 0.9 if eager else 0.9 - self.options["loss"]}

    preprocess = postprocess = None  # no frame comes


class Compiled(Adapter):
    """Options: `dynamic` (both inputs' batch, 1 to 8, the example's is 1), `seed` of the weights, null.

    None.

    `plain` has this process compile packages in that one variant.
    """

    inputs = {"image": "std_msgs/msg/String"}
    output = "std_msgs/msg/String"
    kinds = {
        "full": (Mixed, 16),
        "fast": (Mixed, 4),
        "untraceable": (Untraceable, 4),
        "split": (Split, 16),
    }

    def __init__(self, options, device):
        self.options = options
        if options.get("plain"):
            file_engines._variants = lambda model, *_: {"plain": (model, False)}

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

    def unpad(self, outputs, shapes):
        return pytree.tree_map(lambda tensor: tensor[: shapes[0][0]], outputs)

    preprocess = postprocess = None  # no frame comes
