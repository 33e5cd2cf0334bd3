"""Series with known anomalies.

Recorded while a model runs and is disturbed, and generated ones of every kind.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

DRIVE_HZ = 30
_DAY = 288  # samples at 5 min
_FIVE_MINUTES_S = 300.0
_LENGTH = 6000
_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Labelled:
    """A series: its name and group, times and values, and the anomalies as [first, past the last) sample numbers."""

    name: str
    group: str
    times: list[float]
    values: list[float]
    anomalies: list[tuple[int, int]]


def recorded(samples: int) -> Iterator[Labelled]:
    """Latency and resident memory of a small model in a loop, with real disturbances at known iterations."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.ReLU(),
    ).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield _latency(model, samples)
            yield _memory(model, samples)
    finally:
        torch.set_num_threads(threads)


def _latency(model: torch.nn.Module, samples: int) -> Labelled:
    """Milliseconds of processor time per frame, which others on the machine touch least.

    Two stalls (one frame takes 10 times as long), twice the work for a while, and work that changes.
    """
    image = torch.rand(1, 3, 96, 96)
    draw = random.Random(1)
    at = [round(samples * part) for part in (0.5, 0.6, 0.7, 0.85)]
    stalls = [(at[0], at[0] + 1), (at[1], at[1] + 1)]
    slow, uneven = (at[2], at[2] + samples // 16), (at[3], at[3] + samples // 16)
    for _ in range(50):
        model(image)
    gc.disable()
    times, values = [], []
    for number in range(samples):
        began = time.thread_time()
        runs = 1
        if any(first == number for first, _ in stalls):
            runs = 10
        elif slow[0] <= number < slow[1]:
            runs = 2
        elif uneven[0] <= number < uneven[1]:
            runs = draw.choice((1, 1, 3, 5))
        for _ in range(runs):
            model(image)
        values.append((time.thread_time() - began) * 1e3)
        times.append(time.perf_counter())
    gc.enable()
    settle = 40  # samples after a disturbance that lasts: its end is a change as well
    anomalies = [*stalls, (slow[0], slow[1] + settle), (uneven[0], uneven[1] + settle)]
    return Labelled("latency of a model", "recorded", times, values, anomalies)


def _memory(model: torch.nn.Module, samples: int) -> Labelled:
    """MiB resident, with batches that come and go. A leak of 64 KiB a frame, and 48 MiB at once."""
    process = psutil.Process()
    draw = random.Random(2)
    leak, jump = round(samples * 0.5), round(samples * 0.8)
    length = samples // 8
    held: list[bytearray] = []
    times, values = [], []
    for number in range(samples):
        model(torch.rand(draw.choice((1, 1, 1, 2, 4)), 3, 64, 64))
        if leak <= number < leak + length:
            held.append(bytearray(b"\1" * (64 * _KIB)))
        elif number == jump:
            held.append(bytearray(b"\1" * (48 * _MIB)))
        times.append(time.perf_counter())
        values.append(process.memory_info().rss / _MIB)
    return Labelled(
        "memory of a model", "recorded", times, values, [(leak, leak + length), (jump, jump + 100)]
    )


def drive(seed: int, count: int, change: str = "") -> list[float]:
    """Latencies in ms.

    Noise, a level that wanders, 0.3 % stalls; from the middle on 20 % more, a ramp or variance.
    """
    draw = random.Random(seed)
    values, wander = [], 0.0
    for i in range(count):
        wander = 0.999 * wander + draw.gauss(0, 0.002)
        value = 18 * math.exp(draw.gauss(0, 0.03) + wander)
        if draw.random() < 0.003:
            value *= draw.uniform(1.3, 2.5)
        since = i - count // 2
        if since >= 0 and change == "levels":
            value *= 1.2
        elif since >= 0 and change == "ramps":
            value *= 1 + 0.3 * min(1, since / 1800)
        elif since >= 0 and change == "variances":
            value *= math.exp(draw.gauss(0, 0.12))
        values.append(value)
    return values


def generated(seed: int) -> Iterator[Labelled]:
    """One series for each kind of normal behaviour and anomaly, 5 minutes apart."""
    for number, (base, make) in enumerate(_BASES.items()):
        for order, (kind, disturb) in enumerate(_ANOMALIES.items()):
            if base == "zeros" and kind == "flat line":
                continue  # is no anomaly
            draw = random.Random(seed * 10_000 + number * 100 + order)
            values = make(draw)
            ordered = sorted(values)
            spread = (ordered[int(0.84 * _LENGTH)] - ordered[int(0.16 * _LENGTH)]) / 2 or 1.0
            anomalies = []
            for part in (0.55, 0.8):
                at = round(_LENGTH * part) + draw.randrange(_DAY)
                anomalies.append((at, at + disturb(values, at, spread, draw)))
            times = [1.7e9 + _FIVE_MINUTES_S * i for i in range(_LENGTH)]
            yield Labelled(f"{base}, {kind}", kind, times, values, anomalies)


def _wandering(draw: random.Random) -> list[float]:
    values, state = [], 0.0
    for _ in range(_LENGTH):
        state = 0.95 * state + draw.gauss(0, 1)
        values.append(50 + state)
    return values


def _count(i: int, draw: random.Random) -> float:
    """Of 40 trials, with a daily season."""
    chance = 0.4 + 0.3 * math.sin(2 * math.pi * i / _DAY)
    return float(sum(draw.random() < chance for _ in range(40)))


def _sampled(sample: Callable[[int, random.Random], float]) -> Callable[[random.Random], list[float]]:
    return lambda draw: [sample(i, draw) for i in range(_LENGTH)]


def _spike(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    values[at] += 8 * spread
    return 1


def _burst(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    for i in range(at, at + 24):
        values[i] += 6 * spread * draw.random()
    return 34


def _level(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    for i in range(at, len(values)):
        values[i] += 5 * spread
    return 100


def _ramp(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    for i in range(at, len(values)):
        values[i] += 10 * spread * min(1.0, (i - at) / 600)
    return 640


def _variance(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    for i in range(at, at + 200):
        values[i] += draw.gauss(0, 4 * spread)
    return 220


def _flat(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    values[at : at + 200] = [values[at]] * 200
    return 220


def _missing(values: list[float], at: int, spread: float, draw: random.Random) -> int:
    """No values for a while, then a spike: the gap is no anomaly, what follows is."""
    values[at - 30 : at] = [math.nan] * 30
    values[at] += 8 * spread
    return 1


_BASES = {
    "steady": _sampled(lambda i, draw: draw.gauss(100, 2)),
    "trend": _sampled(lambda i, draw: 100 + 0.01 * i + draw.gauss(0, 2)),
    "daily season": _sampled(
        lambda i, draw: 100 + 30 * math.sin(2 * math.pi * i / _DAY) + draw.gauss(0, 3)
    ),
    "heavy tails": _sampled(  # 2 % of the samples are some times as large
        lambda i, draw: (
            12 * math.exp(draw.gauss(0, 0.12)) + (draw.expovariate(0.12) if draw.random() < 0.02 else 0)
        )
    ),
    "wandering": _wandering,
    "daily counts": _sampled(_count),
    "zeros": _sampled(lambda i, draw: 0.0),
}
_ANOMALIES = {
    "nothing": lambda values, at, spread, draw: 0,
    "spike": _spike,
    "burst": _burst,
    "level": _level,
    "ramp": _ramp,
    "variance": _variance,
    "flat line": _flat,
    "gap, then spike": _missing,
}
