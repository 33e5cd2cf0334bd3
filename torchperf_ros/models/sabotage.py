"""Faults on purpose: an adapter around another one, that stalls, hangs, raises, emits NaN and dies.

For the demo, the benchmarks and the tests of the fallback path. A fault belongs to the run of a worker and
not to the frame, so that another worker that runs the same frame draws its own luck; a `poison_...` belongs
to the frame, as a corrupt image or a scene with too many objects does, and hits whoever runs it.
"""

import contextlib
import ctypes
import itertools
import json
import math
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchperf_ros.api.adapter import Adapter, Received, open_adapter
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.models.options import OptionReader

_POISON: Final = "poison_"
_OF_FRAMES: Final = ("poison_stall", "poison_hang", "poison_sigkill", "poison_sigsegv")
KINDS: Final = ("stall", "gil", "hang", "raise", "nan", "sigkill", "sigsegv", *_OF_FRAMES)
_LONG_S: Final = 3600.0
_Input: TypeAlias = Tensor | None


class Sabotage(RuntimeError):
    """What the fault `raise` raises."""


@dataclass(frozen=True)
class FaultSchedule:
    """When a kind of fault happens.

    Attributes:
        probability: per started inference, 0 to 1.
        every_s: also once per such a period, in one worker of the stage; 0 for never.
        after_s: seconds from the stage's first inference to the first scheduled one; `every_s` unless
            given.
    """

    probability: float = 0.0
    every_s: float = 0.0
    after_s: float = 0.0

    @classmethod
    def read(cls, kind: str, value: object) -> "FaultSchedule":
        """Read an entry of the option `faults`.

        A probability, or a mapping of these fields; or raise `ConfigError`.
        """
        if kind not in KINDS:
            raise ConfigError(f"option faults: unknown kind {kind!r}; known are {', '.join(KINDS)}")
        reader = OptionReader(
            f"faults.{kind}", value if isinstance(value, Mapping) else {"probability": value}
        )
        probability = reader.number("probability", default=0.0, low=0.0, high=1.0)
        every_s = reader.number("every_s", default=0.0, low=0.0, high=math.inf)
        after_s = reader.number("after_s", default=every_s, low=0.0, high=math.inf)
        reader.finish()
        return cls(probability, every_s, after_s)

    def slot(self, since_start_s: float) -> int | None:
        """Number of the scheduled fault that is due, None before the first."""
        if self.every_s <= 0 or since_start_s < self.after_s:
            return None
        return int((since_start_s - self.after_s) // self.every_s)


class FaultDraw:
    """Draws the fault, if any, of each inference that this worker starts, and writes down what was injected.

    The journal has one JSON line per fault. Files beside it, whose names start with its name, are the
    claims by which the workers of a stage share one schedule.
    """

    def __init__(
        self,
        faults: Mapping[str, FaultSchedule],
        journal: Path,
        seed: int,
        clock_ns: Callable[[], int],
        gate: Path | None = None,
    ) -> None:
        """Join the stage's workers: as the n-th to do so, draw from the n-th sequence of this seed.

        `gate`: a file without which no scheduled fault begins, and which each removes; None: they need
        none.
        """
        self._gate = gate
        self._faults, self._journal, self._seed, self._clock_ns = faults, journal, seed, clock_ns
        self._id = random.SystemRandom().getrandbits(62)
        self._known: dict[str, int] = {}
        self._start_ns = self._first("start", clock_ns())
        worker = next(n for n in itertools.count() if self._first(f"worker-{n}", self._id) == self._id)
        self._random = random.Random(f"{seed}/{worker}")

    def draw(self, stamp_ns: int = 0) -> str | None:
        """The kind of fault for this inference of the frame of this stamp.

        Scheduled ones go before drawn ones.
        """
        since_start_s = (self._clock_ns() - self._start_ns) / 1e9
        for kind, fault in self._faults.items():
            slot = fault.slot(since_start_s)
            if slot is not None and self._takes(kind, f"{kind}-{slot}", stamp_ns):
                return kind
        hits = [
            kind for kind, fault in self._faults.items() if self._chance(kind, stamp_ns) < fault.probability
        ]
        return hits[0] if hits else None

    def write(self, kind: str, stamp_ns: int) -> None:
        """Append one line in a single write, so that it is there whole before the fault takes effect."""
        line = {"stamp_ns": stamp_ns, "kind": kind, "pid": os.getpid(), "monotonic_ns": time.monotonic_ns()}
        with self._journal.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _takes(self, kind: str, slot: str, stamp_ns: int) -> bool:
        """Whether a scheduled fault is this inference's.

        Of the first worker that asks, or of the first frame.
        """
        if slot not in self._known and not self._claim(slot).is_symlink() and not self._passes():
            return False
        if kind in _OF_FRAMES:
            return self._first(slot, stamp_ns) == stamp_ns
        return slot not in self._known and self._first(slot, self._id) == self._id

    def _passes(self) -> bool:
        """Whether a fault may begin now; of several workers that ask one removes the gate."""
        if self._gate is None:
            return True
        try:
            self._gate.unlink()
        except FileNotFoundError:
            return False
        return True

    def _chance(self, kind: str, stamp_ns: int) -> float:
        return (
            random.Random(f"{self._seed}/{kind}/{stamp_ns}") if kind in _OF_FRAMES else self._random
        ).random()

    def _first(self, name: str, value: int) -> int:
        """The value that the first of all workers gave for this name."""
        if name not in self._known:
            claim = self._claim(name)
            with contextlib.suppress(FileExistsError):
                claim.symlink_to(str(value))  # it replaces nothing, and is never seen half written
            self._known[name] = int(os.readlink(claim))
        return self._known[name]

    def _claim(self, name: str) -> Path:
        return self._journal.with_name(f"{self._journal.name}.{name}")


class SabotagedAdapter(Adapter):
    """Another adapter, with faults.

    Options:
        adapter: the adapter to sabotage, `module:Class`.
        options: its options, default none.
        journal: path of the file that each fault is written to before it takes effect.
        gate: path of a file without which no scheduled fault begins, and which each removes; "": they need
            none.
        faults: kind -> probability per started inference, or {"every_s": 10, "after_s": 2, "probability":
            0.01}. `stall` sleeps, `gil` keeps every other thread of the process from running, `hang` never
            returns, `raise` raises `Sabotage`, `nan` makes the model's floating-point outputs NaN,
            `sigkill` and `sigsegv` end the process. `poison_stall`, `poison_hang`, `poison_sigkill` and
            `poison_sigsegv` follow a frame.
        seed: of the probabilities, default 0.
        only: the stream whose frames are hit; "": those of all.
        stall_ms, gil_ms: how long, defaults 200 and 100.

    Faults happen in `preprocess`; warm-up, calibration and `observe` are left alone. NaN travels as one
    more model input (0 or NaN, added to the outputs), so that it comes out of the model itself with any
    engine.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Build the inner adapter; a `ConfigError` or `AdapterError` names the wrong option."""
        reader = OptionReader(type(self).__name__, options)
        adapter, inner = reader.text("adapter", default=""), reader.mapping("options")
        self._journal, gate = Path(reader.text("journal", default="")), reader.text("gate", default="")
        self._gate = Path(gate) if gate else None
        self._faults = {
            kind: FaultSchedule.read(kind, value) for kind, value in reader.mapping("faults").items()
        }
        stream, only = options.get("stream", ""), reader.text("only", default="")
        self._is_hit = only in {"", stream}
        self._seed = reader.integer("seed", default=0, low=0, high=1 << 62)
        self._stall_s = reader.number("stall_ms", default=200.0, low=0.0, high=math.inf) / 1e3
        self._gil_us = round(reader.number("gil_ms", default=100.0, low=0.0, high=1e6) * 1e3)
        reader.finish()
        self.inner = open_adapter(adapter, inner | ({"stream": stream} if stream else {}), device)
        self._poison = {
            kind: torch.tensor([value], device=device) for kind, value in (("nan", math.nan), ("", 0.0))
        }
        self._luck: FaultDraw | None = None
        # Histories stay whole, and a further input comes last and moves no dimension of the others.
        for name in (
            "observe",
            "missed",
            "forget",
            "dynamic_dims",
            "inputs",
            "output",
            "anytime",
            "scene",
            "score",
            "score_messages",
            "example_messages",
        ):
            setattr(self, name, getattr(self.inner, name))

    def build(self, tier: str) -> nn.Module:
        """The inner model; where `nan` is among the faults it takes one more input, see `Poisonable`."""
        model = self.inner.build(tier)
        return Poisonable(model).eval() if "nan" in self._faults else model

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """The inner adapter's, never with a fault."""
        return self._harmless(self.inner.example_inputs(tier))

    def score_inputs(self, tier: str) -> Sequence[tuple[Tensor, ...]]:
        """Likewise."""
        return [self._harmless(inputs) for inputs in self.inner.score_inputs(tier)]

    def _harmless(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*inputs, self._poison[""]) if "nan" in self._faults else inputs

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """Draw this inference's luck, note it, let it happen (it may raise `Sabotage`), and pass on."""
        if self._luck is None:
            self._luck = FaultDraw(self._faults, self._journal, self._seed, time.monotonic_ns, self._gate)
        stamp_ns = messages[next(iter(self.inputs))].stamp_ns
        kind = self._luck.draw(stamp_ns) if self._is_hit else None
        if kind is not None:
            self._luck.write(kind, stamp_ns)
            self._inject(kind.removeprefix(_POISON))
        inputs = self.inner.preprocess(messages)
        return (*inputs, self._poison["nan" if kind == "nan" else ""]) if "nan" in self._faults else inputs

    def steps(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Any]:
        """The inner adapter's, all of them with NaN if one is."""
        if not isinstance(model, Poisonable):
            return self.inner.steps(model, inputs)
        return (_poisoned(outputs, inputs[-1]) for outputs in self.inner.steps(model.model, inputs[:-1]))

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """Pass on."""
        return self.inner.postprocess(outputs, messages)

    def _inject(self, kind: str) -> None:
        if kind == "stall":
            time.sleep(self._stall_s)
        elif kind == "gil":
            hold_gil(self._gil_us)
        elif kind == "hang":
            while True:
                time.sleep(_LONG_S)
        elif kind == "raise":
            raise Sabotage("sabotage: this inference raises")
        elif kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "sigsegv":
            resource.setrlimit(
                resource.RLIMIT_CORE, (0, 0)
            )  # a core file of this process takes seconds and a gigabyte
            ctypes.string_at(0)


class Poisonable(nn.Module):
    """A model with one more input, last and of shape (1,), which it adds to its floating-point outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(  # named parameters and no *inputs: torch.export maps dynamic dimensions by them
        self,
        a: Tensor,
        b: _Input = None,
        c: _Input = None,
        d: _Input = None,
        e: _Input = None,
        f: _Input = None,
        g: _Input = None,
        h: _Input = None,
    ) -> Any:  # noqa: ANN401 - the model returns any type
        """Run the model on all inputs but the last, which is 0 or NaN."""
        *inputs, poison = (x for x in (a, b, c, d, e, f, g, h) if x is not None)
        return _poisoned(self.model(*inputs), poison)


def _poisoned(outputs: Any, poison: Tensor) -> Any:  # noqa: ANN401
    def one(output: Tensor) -> Tensor:
        return output + poison[0].to(output.dtype) if output.is_floating_point() else output

    return pytree.tree_map_only(Tensor, one, outputs)


def hold_gil(duration_us: int) -> None:
    """Keep every other Python thread of this process from running, as a long call into C does."""
    ctypes.PyDLL(None).usleep(duration_us)
