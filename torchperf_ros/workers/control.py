"""What node and worker say to each other beside frames: typed messages, and their one encoder.

Each is a frozen dataclass that goes as JSON, see `protocol.pack_control`. The reader checks every value
against the type of its field, so that nothing behind it looks up names or guesses types.
"""

import dataclasses
import functools
import types
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.workers.calibration import Batching, Calibration
from torchperf_ros.workers.incident_folder import EvidenceLimits
from torchperf_ros.workers.protocol import pack_control, pack_report, unpack_control


@dataclass
class TierFacts:
    """What `/diagnostics` shows of a tier's engine.

    Attributes:
        engine: what runs it now; `why` that is not the engine that was asked for.
        choice: how engine auto has come to it, in words; "" for other engines.
        graphs, breaks, cache_hits, package, parts: see `Runner`.
        recompiles: calls that would have compiled again, answered in eager instead; `guards` has why.
        engine_errors: calls in which the engine raised.
        eager_answers: frames that eager answered in place of the engine.
        shapes: policy for sizes that is in force.
        hits, misses, waste: see `ShapeRunner`.
        model: hash of weights and code, if it was asked for at the start; "" otherwise.
        load_s: how long it took to make it ready, compiling included.
    """

    name: str
    engine: str
    why: str = ""
    choice: str = ""
    graphs: int = 0
    breaks: int = 0
    cache_hits: int = 0
    package: str = ""
    parts: str = ""
    recompiles: int = 0
    engine_errors: int = 0
    eager_answers: int = 0
    guards: str = ""
    shapes: str = ""
    hits: int = 0
    misses: int = 0
    waste: float = 0.0
    model: str = ""
    load_s: float = 0.0


# -- worker to node


@dataclass(frozen=True)
class Description:
    """What an adapter says of itself.

    Inputs in order (topic, type), output type, whether it keeps histories.

    On CUDA `card` is the device's name; `scores`: it has a `score_messages`.
    """

    inputs: tuple[tuple[str, str], ...]
    output: str
    observes: bool
    device: str
    card: str = ""
    scores: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a worker's start has come; `capturing`: the key of what it captures as a CUDA graph now."""

    text: str
    capturing: str = ""


@dataclass(frozen=True)
class Ready:
    """It can take frames. `missing`: tiers that run in eager because they are not compiled yet."""

    calibrations: tuple[Calibration, ...]
    tiers: tuple[TierFacts, ...]
    missing: tuple[str, ...]
    batching: Batching = Batching()


@dataclass(frozen=True)
class TierReport:
    """Once a second: its tiers, and for how many frames the device's memory did not suffice."""

    tiers: tuple[TierFacts, ...]
    out_of_memory: int


@dataclass(frozen=True)
class MemoryReport:
    """Once a second: what its memory is used for, in bytes."""

    bytes: dict[str, int]


@dataclass(frozen=True)
class Remark:
    """A line for the node's log; as an `alert` also for `/perf/anomaly`, once."""

    text: str
    alert: bool = False


@dataclass(frozen=True)
class LastWords:
    """Why it is about to end.

    Attributes:
        permanent: another start would fail alike.
        without_graphs: the next one may start if it captures no CUDA graphs.
        out_of_memory: it lacked memory on the device.
        found_out: it has found out that a model cannot be captured, which the next one need not.
    """

    text: str
    permanent: bool = False
    without_graphs: bool = False
    out_of_memory: bool = False
    found_out: bool = False


@dataclass(frozen=True)
class CaptureBegan:
    """It records from now on; `error`: why it does not, or ""."""

    what: str
    error: str


@dataclass(frozen=True)
class CaptureFull:
    """Enough is recorded."""

    what: str


@dataclass(frozen=True)
class CaptureDone:
    """What was recorded is in the folder `path`, and comes to `summary`; `error`: why not, or ""."""

    what: str
    path: str
    summary: str
    error: str


Report: TypeAlias = (
    Description
    | Progress
    | Ready
    | TierReport
    | MemoryReport
    | Remark
    | LastWords
    | CaptureBegan
    | CaptureFull
    | CaptureDone
)


# -- node to worker


@dataclass(frozen=True)
class BeginCapture:
    """Record a `profile` or the `memory`, to be kept in the folder of these limits."""

    what: str
    evidence: EvidenceLimits


@dataclass(frozen=True)
class EndCapture:
    """End what is recorded, and write it."""


Command: TypeAlias = BeginCapture | EndCapture

REPORTS: Final = get_args(Report)
COMMANDS: Final = get_args(Command)


# -- the encoder


def pack_message(message: Any) -> bytes:  # noqa: ANN401 - any of these dataclasses
    """A message as bytes; a `ProtocolError` where it is too long."""
    return pack_control(type(message).__name__, **asdict(message))


def pack_readable(message: Report) -> bytes:
    """A message for people as bytes; its texts are cut until it fits."""
    return pack_report(type(message).__name__, **asdict(message))


def unpack_message(data: bytes, *kinds: type[Any]) -> Any:  # noqa: ANN401 - one of these dataclasses
    """A message of one of these kinds; a `ProtocolError` where it is none, or a field has another type."""
    message = unpack_control(data)
    name = message.pop("kind")
    del message["version"]
    for kind in kinds:
        if kind.__name__ == name:
            return _typed(kind, message, name)
    allowed = ", ".join(kind.__name__ for kind in kinds)
    raise ProtocolError(f"unknown control message {name!r}; it has to be one of {allowed}")


_hints = functools.cache(get_type_hints)
T = TypeVar("T")


def _typed(kind: Any, value: Any, name: str) -> Any:  # noqa: ANN401, PLR0911 - a type, a JSON value
    """A JSON value as the type of its field; a `ProtocolError` names the field that has another."""
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in {Union, types.UnionType}:  # in these messages: or None
        return None if value is None else _typed(of[0], value, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _filled(kind, value, name)
    if origin in {tuple, list} and isinstance(value, list):
        each = of[:1] * len(value) if origin is list or of[1:] == (Ellipsis,) else of
        if len(each) == len(value):
            return origin(_typed(*pair, name) for pair in zip(each, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: _typed(of[1], entry, f"{name}.{key}") for key, entry in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise ProtocolError(f"{name} is {str(value)[:100]!r}; it has to be of type {kind}")


def _filled(kind: Any, value: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - a dataclass
    hints = _hints(kind)
    try:
        return kind(**{key: _typed(hints[key], entry, f"{name}.{key}") for key, entry in value.items()})
    except (KeyError, TypeError) as error:  # a field that it does not have, or one that is missing
        raise ProtocolError(f"{name} has the fields {', '.join(value)}: {error}") from error


def from_json(kind: type[T], value: object) -> T:
    """What `asdict` gave, and JSON has kept, as this dataclass; `ProtocolError` names a wrong field."""
    found: T = _typed(kind, value, kind.__name__)
    return found
