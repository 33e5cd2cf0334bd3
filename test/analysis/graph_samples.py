"""Code that breaks graphs, or is compiled again and again, and the same thing written so that it does not.

Each sample is inspected: the line with the comment `# breaks` is where its break has to be found.
"""

import logging
import time

import numpy as np
import torch
from torch import nn

LOG = logging.getLogger(__name__)


def value_if_bad(x):
    y = torch.relu(x)
    if y.sum() > 0:  # breaks
        return y * 2
    return y * 3


def value_if_good(x):
    y = torch.relu(x)
    return torch.where(y.sum() > 0, y * 2, y * 3)


class ItemBad(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        score = y.max().item()  # breaks
        return y, score * 2


class ItemGood(ItemBad):
    def forward(self, x):
        y = self.layer(x)
        return y, y.max() * 2


def element_loop_bad(x):
    total = torch.zeros(x.shape[1])
    for row in x:
        if row.sum() > 0:  # breaks
            total = total + row
    return total


def element_loop_unrolled(x):
    total = torch.zeros(x.shape[1])
    for row in x:
        total = total + row * row
    return total


def element_loop_good(x):
    keep = (x.sum(1) > 0).to(x.dtype)
    return (x * keep[:, None]).sum(0)


def shape_if_bad(x):
    if x.shape[0] > 5:
        return x.sum(0)
    return x.mean(0) * 2


def shape_if_good(x):
    return x.sum(0) / x.shape[0]


def subsample_bad(x):
    if x.shape[0] > 5:
        x = x[torch.randperm(x.shape[0])[:5]]
    return x.mean(0)


def subsample_good(x):
    return x[torch.randint(0, x.shape[0], (5,))].mean(0)


def report_bad(x):
    parts = {"all": x * 2}
    rows = [x[0] + 1, x[1] + 1]
    print("mean", x.mean())  # breaks
    parts["rows"] = torch.stack(rows)
    return parts


def report_good(x):
    parts = {"all": x * 2}
    rows = [x[0] + 1, x[1] + 1]
    parts["rows"] = torch.stack(rows)
    parts["mean"] = x.mean()
    return parts


def logging_bad(x):
    LOG.warning("mean %s", x.mean())  # breaks
    return x * 2


def numpy_bad(x):
    y = torch.relu(x)
    order = np.lexsort((y[:, 1].numpy(), y[:, 0].numpy()))  # breaks
    return y[torch.from_numpy(order)]


def numpy_traced(x):
    return x * torch.from_numpy(np.sqrt(np.abs(x.numpy())))


def numpy_good(x):
    y = torch.relu(x)
    return y[torch.argsort(y[:, 0], stable=True)]


def count_bad(x):
    rounds = int(x.abs().max()) + 1  # breaks
    for _ in range(rounds):
        x = torch.sin(x)
    return x


def count_while_bad(x):
    while x.norm() > 1:  # breaks
        x = x * 0.5
    return x


def count_good(x):
    rounds = x.abs().max().long() + 1
    for i in range(4):
        x = torch.where(i < rounds, torch.sin(x), x)
    return x


class NormBad(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch, self.layer = nn.BatchNorm1d(8), nn.LayerNorm(8)

    def pick(self, x, flag):
        if flag:  # breaks
            return self.batch(x)
        return self.layer(x)

    def forward(self, x):
        return self.pick(x * 2, x.mean() > 0) + 1


class NormGood(NormBad):
    def pick(self, x, flag):
        return torch.where(flag, self.batch(x), self.layer(x))


def dynamic_shape_bad(x):
    rows = x[x[:, 0] > 0]  # breaks
    return rows.sum(0)


def sleep_bad(x):
    time.sleep(0)  # breaks
    return x * 2


def print_in_loop_bad(x):
    for step in range(3):
        x = torch.sin(x)
        print(step, x.mean())  # breaks
    return x


def open_bad(x):
    open("/dev/null").close()  # breaks
    return x * 2


def raises_when_compiled(x):
    middle = np.median(x.numpy())
    return x * float(middle)


def layers_in_loop():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return Layers()


def counting():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    return Counting()


def two_arguments(image, count):
    return image * count


class disabled(nn.Module):
    @torch.compiler.disable(recursive=True)
    def forward(self, x):
        return x * 2


def breaks_in_turn(x):
    x = torch.relu(x)
    print(x.max().item())
    y = torch.sin(x)
    scale = y.max().item()
    return y * scale * x.sum()


def idle(x):
    return x


class runs_once(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = False

    def forward(self, x):
        if self.used:
            raise RuntimeError("already used")
        self.used = True
        return x * 2


NOT_CALLABLE = 3


def raising(x):
    raise ValueError("the model's own words")
