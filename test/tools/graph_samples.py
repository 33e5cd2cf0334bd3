"""Code that breaks graphs, or is compiled again and again.

The comment `# breaks` marks the line to be found.
"""

import logging
import time

import numpy as np
import torch
from torch import nn

LOG = logging.getLogger(__name__)
LAYERS = [nn.Linear(8, 8) for _ in range(4)]
CALLS = []


def value_if(x):
    y = torch.relu(x)
    if y.sum() > 0:  # breaks
        return y * 2
    return y * 3


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch, self.layer = nn.BatchNorm1d(8), nn.LayerNorm(8)

    def pick(self, x, flag):
        if flag:  # breaks
            return self.batch(x)
        return self.layer(x)

    def forward(self, x):
        return self.pick(x * 2, x.mean() > 0) + 1


class Item(nn.Module):
    def forward(self, x):
        score = x.max().item()  # breaks
        return x, score * 2


def item_then_branch(x):
    score = x.sum().item()  # breaks
    if score > 1:
        return x
    return x * 2


def scaled(x):
    mean = x.mean().item()  # breaks
    return x * mean + 2 * (mean * x)


def scaled_by_a_tensor(x):
    mean = x.mean()
    return x * mean + 2 * (mean * x)


def rescaled(x):
    y = 2 * x
    first = y[0, 0].item()  # breaks
    y += 1
    return y * first


def wraps(x):
    largest = (x * 100).clamp(0, 255).to(torch.uint8).max().item()  # breaks
    return x + largest * 3


def inverted(x):
    any_above = (x > 0).any().item()  # breaks
    return x * (1 - any_above)


def precise(x):
    offset = x.mean().item()  # breaks
    return x * (offset + 1e8 - 1e8)


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        now = x.mean().item()  # breaks
        self.mean = 0.9 * self.mean + 0.1 * now
        return x - self.mean


def as_float(x):
    return x / float(x.abs().max())  # breaks


def counted(x):
    above = (x > 0).sum().item()  # breaks
    return x * above / 7


SEEN = {}


def keyed(x):
    mean = x.mean().item()  # breaks
    SEEN[mean + 1] = True
    return x * mean


def whole(x):
    count = int(3 * x.max())  # breaks
    return x * count


def excepted(x):
    try:
        share = x / (0.0 * x.sum().item())  # breaks
    except ZeroDivisionError:
        share = x
    return share


def percentile(x):
    high = np.percentile(x.numpy(), 90)
    return x / float(high + 1)  # breaks


def layers_in_loop(x):
    for layer in LAYERS:
        x = layer(x)
    return x


def early_exit(x):
    for i in range(len(LAYERS)):
        x = LAYERS[i](x)
        if x.mean() > 9:  # breaks
            return x
    return x


def element_loop(x):
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


def floats(x):
    y = torch.relu(x[0])
    values = [float(v) for v in y]  # breaks
    return x * torch.tensor(values)


def shape_if(x):
    if x.shape[0] > 5:
        x = x[torch.randperm(x.shape[0])[:5]]
    return x.mean(0)


def any_shape(x):
    return x.sum(0) / x.shape[0]


def printed(x):
    parts = {"all": x * 2}
    print("mean", x.mean())  # breaks
    return parts


def printed_in_loop(x):
    for step in range(3):
        x = torch.sin(x)
        print(step, x.mean())  # breaks
        print("and once more", step, x.max())
    return x


def printed_in_function(x):
    def scaled(y):
        print(y.mean())  # breaks
        return y * 2

    return scaled(x)


def logged(x):
    LOG.warning("mean %s", x.mean())  # breaks
    return x * 2


def lexsort(x):
    y = torch.relu(x)
    order = np.lexsort((y[:, 1].numpy(), y[:, 0].numpy()))  # breaks
    return y[torch.from_numpy(order)]


def median(x):
    y = torch.relu(x)
    return y * np.median(y.tolist())  # breaks


def numpy_traced(x):
    return x * torch.from_numpy(np.sqrt(np.abs(x.numpy())))


def count(x):
    rounds = int(x.abs().max()) + 1  # breaks
    for _ in range(rounds):
        x = torch.sin(x)
    return x


def count_while(x):
    while x.norm() > 1:  # breaks
        x = x * 0.5
    return x


def rows_above(x):
    rows = x[x[:, 0] > 0]  # breaks
    return rows.sum(0)


def sleeps(x):
    time.sleep(0)  # breaks
    return x * 2


def breaks_in_turn(x):
    x = torch.relu(x)
    print(x.max().item())
    y = torch.sin(x)
    scale = y.max().item()
    return y * scale * x.sum()


def counting(x):
    CALLS.append(x.shape)
    return x * len(CALLS)


class disabled(nn.Module):
    @torch.compiler.disable(recursive=True)
    def forward(self, x):
        return x * 2


def runs_once(x):
    if CALLS:
        raise RuntimeError("already used")
    CALLS.append(x.shape)
    return x * 2


def two_arguments(image, count):
    return image * count


def idle(x):
    return x


def raising(x):
    raise ValueError("the model's own words")


def factory():
    return Norm()


class Recurrent(torch.nn.Module):
    """An LSTM, which torch.compile leaves out unless it may have it."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x[None])[0] * 2  # breaks


def scripted():
    """Makes a model, as a class does."""
    return torch.jit.script(nn.Linear(8, 4))
