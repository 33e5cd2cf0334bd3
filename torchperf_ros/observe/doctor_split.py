"""Where the time between a frame's stamp and its output goes.

A figure for each part, computed from every frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.runs.run_log import STEPS, StageLog, Values
from torchperf_ros.stage.frame import USABLE_AGE_MS

# The parts in the order of time; the last two come after `stamp to publish`.
PARTS: Final = {
    "camera": "stamp to publication by the driver",
    "transport": "publication to receipt by the node",
    "input": "stamp to receipt: camera and transport together",
    "before": "stamp to hand-over by the stage before",
    "queue": "mailbox, and inputs that are waited for",
    "decode": "CDR to a message",
    "preprocess": "message to tensors",
    "inference": "the model; also results that came too late",
    "postprocess": "tensors to a message",
    "publish": "hand-over to the worker and back, guard, sending",
    "receive": "publication to arrival at another subscriber",
    "actuation": "publication to what the receiver publishes",
}
AFTER: Final = ("receive", "actuation")
_MATCH_NS: Final = 8_000_000  # a row's stamp is computed from the time at which the row was sent
_CLOCK_MS: Final = 1.0  # no message is sent so long before its stamp where all clocks agree
_SLOWEST: Final = 95.0  # percentile from which frames are the slow ones
_LEAST_EXCESS_MS: Final = 1.0
_LEAST_EXCESS_SHARE: Final = 0.1


class Message(NamedTuple):
    """A message as another subscriber got it; times in ns, by the clocks of the machines that wrote them."""

    stamp_ns: int  # its header's; 0 without one
    sent_ns: int  # when its publisher sent it
    received_ns: int  # when the middleware here received it
    number: int  # its publisher's count
    size_bytes: int  # of its CDR


@dataclass
class Heard:
    triggers: list[Message] = field(default_factory=list)
    outputs: list[Message] = field(default_factory=list)
    actuations: list[Message] = field(default_factory=list)  # of a receiver, with the stamps of outputs

    def actuation_ms(self) -> Values:
        """From the first output of a stamp to the receiver's first message with that stamp, shape [n]."""
        sent_ns: dict[int, int] = {}
        for one in self.outputs:
            sent_ns.setdefault(one.stamp_ns, one.sent_ns)
        first = {one.stamp_ns: one.sent_ns for one in reversed(self.actuations) if one.stamp_ns}
        return np.array(
            [(at_ns - sent_ns[stamp]) / NS_PER_MS for stamp, at_ns in first.items() if stamp in sent_ns]
        )


@dataclass(frozen=True)
class Part:
    name: str  # of `PARTS`
    p50_ms: float
    p99_ms: float
    mean_ms: float
    share: float  # of stamp to publish, by the means
    count: int  # frames, or messages, that it was measured of


@dataclass(frozen=True)
class Split:
    """The parts of a stage's frames.

    Attributes:
        whole: stamp to publish; receipt to publish where no frame has a usable stamp.
        arrival: how old outputs are when another subscriber has them; of no messages without a subscriber.
        age_ms: p50 of stamp to receipt, 0 where unknown.
        slow_part: the part that makes the slowest 5 % of the frames slow, empty if it is the largest part,
            or none.
        slow_ms: how much longer than usual it takes in these.
        published: triggers that were published between the first frame and the last; 0 where not known.
        lost: those of them that came neither to the node nor to another subscriber.
        clock_ms: how far the clock of who stamps, or publishes, is off, as far as it is seen; NaN if it is
            not.
        notes: what cannot be split, and why.
    """

    stage: str
    frames: int
    parts: tuple[Part, ...]
    whole: Part
    arrival: Part
    age_ms: float = 0.0
    slow_part: str = ""
    slow_ms: float = 0.0
    published: int = 0
    lost: int = 0
    clock_ms: float = math.nan
    notes: tuple[str, ...] = ()

    def part(self, name: str) -> Part:
        return next((part for part in self.parts if part.name == name), Part(name, 0.0, 0.0, 0.0, 0.0, 0))

    @property
    def largest(self) -> Part | None:
        return max(self.parts, key=lambda part: part.mean_ms, default=None)


def split(
    log: StageLog, heard: Heard | None = None, *, handed_over: bool = False, sim_time: bool = False
) -> Split:
    """Split the time of a stage's frames; those that came while it started are left out.

    Args:
        log: the stage's frames.
        heard: what another subscriber heard; None without one, as with a log.
        handed_over: its triggers are the outputs of another stage of the node.
        sim_time: the node's stamps and ages are by a simulated clock, which no publisher's time fits.
    """
    heard = heard or Heard()
    frames = log.frames[log.counted & np.isfinite(log.total_ms)]
    age: Values = frames[
        "age_ms"
    ]  # with a type for each column, which mypy takes seconds to work out itself
    total: Values = frames["total_ms"]
    wait: Values = frames["wait_ms"]
    inference: Values = frames["inference_ms"]
    usable = (age >= -_CLOCK_MS) & (age <= USABLE_AGE_MS)
    age = np.where(usable, age, np.nan)
    notes, clock_ms = _about_stamps(frames, sim_time=sim_time)
    match = np.full(len(frames), -1) if sim_time else _matches(frames, heard.triggers)
    sent_ms = np.array([(one.sent_ns - one.stamp_ns) / NS_PER_MS for one in heard.triggers] or [np.nan])
    camera = np.where((match >= 0) & usable, sent_ms[match], np.nan)
    early_ms = min(_median(camera), _median(age - camera))
    columns: dict[str, Values] = {"before" if handed_over else "input": age}
    if early_ms < -_CLOCK_MS:
        notes.append(
            f"a message is sent, or received, {-early_ms:.1f} ms before its time: clocks differ; not split"
        )
        clock_ms = early_ms if math.isnan(clock_ms) else clock_ms
    elif np.isfinite(camera).any():
        columns = {"camera": camera, "transport": age - camera}
    columns |= {"queue": wait} | {step.removesuffix("_ms"): frames[step] for step in STEPS[1:]}
    unfinished = np.isnan(inference) & np.isin(frames["outcome"], (Outcome.LATE, Outcome.HUNG))
    columns["inference"] = np.where(unfinished, total - np.nan_to_num(wait), inference)
    steps: list[Values] = [frames[step] for step in STEPS]
    columns["publish"] = total - np.sum(steps, axis=0)
    whole = np.nan_to_num(age) + total
    parts = [_part(name, column, whole) for name, column in columns.items() if np.isfinite(column).any()]
    came = [one for one in heard.outputs if one.received_ns]
    receive = np.array([(one.received_ns - one.sent_ns) / NS_PER_MS for one in came if one.sent_ns])
    arrival = np.array([(one.received_ns - one.stamp_ns) / NS_PER_MS for one in came if one.stamp_ns])
    after = zip(AFTER, (receive, heard.actuation_ms()), strict=True)
    parts += [_part(name, column, whole) for name, column in after if len(column)]
    slow_part, slow_ms = _slow_part(columns, whole)
    begin = "stamp" if usable.any() or not len(frames) else "receipt"
    largest = max(parts, key=lambda part: part.mean_ms, default=None)
    return Split(
        log.name,
        len(frames),
        tuple(parts),
        _part(f"{begin} to publish", whole, whole),
        _part("stamp to arrival", arrival if usable.any() and not sim_time else np.empty(0), whole),
        max(_median(age), 0.0),
        "" if largest is None or slow_part == largest.name else slow_part,
        slow_ms,
        *_lost(frames["seq"], match, heard.triggers),
        clock_ms,
        tuple(notes),
    )


def _about_stamps(frames: NDArray[np.void], *, sim_time: bool) -> tuple[list[str], float]:
    age = frames["age_ms"]
    odd = (age < -_CLOCK_MS) | (age > USABLE_AGE_MS)
    notes, without = [], int(np.isnan(age).sum())
    if without:
        notes.append(
            f"{without:,} of {len(age):,} frames have no stamp: camera and transport of these are not known"
        )
    if odd.any():
        notes.append(
            f"{int(odd.sum()):,} of {len(age):,} stamps lie in the future or more than 10 s back (median of"
            f" stamp to receipt {_median(age[odd]):,.1f} ms): clocks differ; these frames count from"
            " receipt"
        )
    if sim_time:
        notes.append(
            "use_sim_time: stamps are by a simulated clock, so camera and transport cannot be separated"
        )
    return notes, _median(age[odd]) if odd.any() and not sim_time else math.nan


def _matches(frames: NDArray[np.void], triggers: Sequence[Message]) -> NDArray[np.int64]:
    """For each frame the place of its trigger among those that were heard, -1 where it was not."""
    known = [place for place, one in enumerate(triggers) if one.stamp_ns and one.sent_ns]
    if not known:
        return np.full(len(frames), -1)
    order = np.array(sorted(known, key=lambda place: triggers[place].stamp_ns))
    stamps = np.array([triggers[place].stamp_ns for place in order])
    wanted: NDArray[np.int64] = frames["stamp_ns"]
    right = np.clip(np.searchsorted(stamps, wanted), 1, max(len(stamps) - 1, 1)).astype(np.int64)
    right = np.minimum(right, len(stamps) - 1)
    left = np.maximum(right - 1, 0)
    is_left = np.abs(stamps[left] - wanted) <= np.abs(stamps[right] - wanted)
    nearest = np.where(is_left, left, right)
    near = (np.abs(stamps[nearest] - wanted) <= _MATCH_NS) & (wanted != 0)
    return np.where(near, order[nearest], -1)


def _lost(seq: NDArray[np.int64], match: NDArray[np.int64], triggers: Sequence[Message]) -> tuple[int, int]:
    """How many triggers were published between the first matched frame and the last, and how many were lost.

    Lost is what came neither to the node nor here: an input keeps only its newest message, so what came
    here alone was replaced by a newer one before the node took it.
    """
    matched = np.flatnonzero(match >= 0)
    if len(matched) < 2:  # noqa: PLR2004
        return 0, 0
    first, last = (triggers[match[place]].number for place in (matched[0], matched[-1]))
    here = len({one.number for one in triggers if first < one.number <= last})
    received = int(seq[matched[-1]] - seq[matched[0]])
    published = last - first  # of one publisher; of several, whose counts differ, nothing is known
    return (published, published - max(received, here)) if published >= max(received, here) > 0 else (0, 0)


def _slow_part(columns: dict[str, Values], whole: Values) -> tuple[str, float]:
    """The part by which the slowest frames are slow, and by how many ms; empty where nothing stands out."""
    if not len(whole):
        return "", 0.0
    slow = whole >= np.percentile(whole, _SLOWEST)
    excess = {name: _mean(column[slow]) - _median(column) for name, column in columns.items()}
    known = {name: value for name, value in excess.items() if math.isfinite(value)}
    name = max(known, key=lambda one: known[one], default="")
    least_ms = max(_LEAST_EXCESS_MS, _LEAST_EXCESS_SHARE * _median(whole))
    return (name, known[name]) if name and known[name] >= least_ms else ("", 0.0)


def _part(name: str, column: Values, whole: Values) -> Part:
    known = column[np.isfinite(column)]
    if not len(known):
        return Part(name, math.nan, math.nan, math.nan, math.nan, 0)
    of = whole if len(column) != len(whole) or name in AFTER else whole[np.isfinite(column)]
    p50, p99 = np.percentile(known, (50.0, 99.0))
    mean = float(known.mean())
    return Part(name, float(p50), float(p99), mean, mean / max(_mean(of), 1e-9), len(known))


def _median(values: Values) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _mean(values: Values) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
