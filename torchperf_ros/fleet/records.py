"""What a vehicle brings home.

A line of JSON for each minute with a candidate, and for each event, in a file a day.

Two versions ran on the same frames, so that each minute has paired figures. A line is appended whole; one
that was cut by a loss of power is left out when it is read, and the next one begins a line of its own. The
files of a folder are
bounded: the oldest day goes first.
"""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.fleet.plan import CandidateFigures, RolloutPlan
from torchperf_ros.settings.files import make_private, open_regular

VERSION: Final = 1
# A block is a minute of a vehicle.
#
# Long enough for a p99 of 1,800 frames, short enough to be exposed again at once.
BLOCK_S: Final = 60.0
# What the candidate did in a minute: it ran beside the version in service, or it was in service.
SHADOW, SERVING = "shadow", "serving"
# Of all files of a folder.
#
# A minute takes some 400 bytes, so this is half a year of driving eight hours a day.
LIMIT_BYTES: Final = 64 << 20
_NAME: Final = "rollout-%Y%m%d.jsonl"
_PATTERN: Final = "rollout-????????.jsonl"
_P99: Final = 99.0
# No time, sum or count of a minute is larger; columns hold 64 bits.
_LARGEST: Final = 1e15
# A vehicle's clock may be ahead by so much, as its plans' may be, see `signature.check_time`.
_AHEAD_S: Final = 600.0


@dataclass(frozen=True)
class Block:
    """A minute of a vehicle in which two versions ran on the same frames.

    Attributes:
        t_s: its end, UTC in s.
        drive: id of the drive; minutes of one drive are alike, and are not counted as independent.
        version, serial, step: of the plan.
        role: `shadow` or `serving`: what the candidate did.
        frames: that both versions were given.
        base_sum_ms, candidate_sum_ms: of the times of those that both ran to the end.
        base_p99_ms, candidate_p99_ms: of the minute.
        base_misses, candidate_misses: frames over the budget, or without a result.
        compared, agreed: outputs by the rules of golden tests.
        score: mean of the adapter's own score of the candidate's outputs beside the base's; NaN without
        one. deaths, refused, safe_stops: see `CandidateFigures`; of the candidate.
        memory_mib: of the candidate's worker at the end; NaN where it is not known.
        memory_mib_per_h: its trend; NaN where it is not known.
        stage, rollout: the plan's, by its name; "" in lines of versions that did not write them.
    """

    t_s: float
    drive: str
    version: str
    serial: int
    step: int
    role: str
    frames: int = 0
    base_sum_ms: float = 0.0
    candidate_sum_ms: float = 0.0
    base_p99_ms: float = math.nan
    candidate_p99_ms: float = math.nan
    base_misses: int = 0
    candidate_misses: int = 0
    compared: int = 0
    agreed: int = 0
    score: float = math.nan
    deaths: int = 0
    refused: int = 0
    safe_stops: int = 0
    memory_mib: float = math.nan
    memory_mib_per_h: float = math.nan
    stage: str = ""
    rollout: str = ""

    @property
    def figures(self) -> CandidateFigures:
        return CandidateFigures(
            self.frames,
            self.deaths,
            self.refused,
            self.safe_stops,
            self.candidate_misses,
            self.memory_mib_per_h,
            self.compared - self.agreed,
            self.compared,
        )


# array-likes
def paired_figures(base_ms: Any, candidate_ms: Any, budget_ms: float) -> dict[str, Any]:  # noqa: ANN401
    """The figures of a `Block` that are made of the times of the same frames, the last axis of both.

    Args:
        base_ms: shape (..., frames), at least one frame; NaN where the version has no result, which is a
            miss.
        candidate_ms: likewise; sums and p99 are of the frames for which both have one.
        budget_ms: what is longer is a miss.
    """
    arms = {"base": np.asarray(base_ms, float), "candidate": np.asarray(candidate_ms, float)}
    both = np.isfinite(arms["base"]) & np.isfinite(arms["candidate"])
    found: dict[str, Any] = {"frames": np.shape(base_ms)[-1]}
    for name, values in arms.items():
        paired = np.where(both, values, np.nan)
        found[f"{name}_sum_ms"] = np.nansum(paired, axis=-1)
        found[f"{name}_p99_ms"] = np.nanpercentile(paired, _P99, axis=-1)
        found[f"{name}_misses"] = np.count_nonzero(~(values <= budget_ms), axis=-1)
    return found


class RecordWriter:
    """Appends lines to the file of the day.

    Where the disk does not take them, they are counted and left out.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Write for the vehicle of these facts; the folder is made when there is something to write."""
        self.facts = facts  # another mapping where they change
        self.problem = ""  # why nothing can be written at present
        self.lost = 0  # lines that could not be
        self._written: tuple[Path, Mapping[str, Any]] | None = None  # facts, and the file that has them
        self._folder, self._limit_bytes, self._clock = folder, limit_bytes, clock

    def minute(self, block: Block) -> None:
        """Append a minute; never raises for a disk that is full or read-only."""
        self._append({"kind": "minute", **asdict(block)}, lasting=False)

    def event(
        self, what: str, version: str, serial: int, reason: str = "", stage: str = "", rollout: str = ""
    ) -> None:
        """Append an event: `trial`, `confirmed`, `rolled_back`, `refused`; it is on the disk on return."""
        self._append(
            {
                "kind": "event",
                "t_s": self._clock(),
                "what": what,
                "version": version,
                "serial": serial,
                "reason": reason,
                "stage": stage,
                "rollout": rollout,
            },
            lasting=True,
        )

    def _append(self, line: dict[str, Any], *, lasting: bool) -> None:
        line = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        path = self._folder / time.strftime(_NAME, time.gmtime(self._clock()))
        try:
            make_private(self._folder)
            with path.open("a+b") as file:
                size, before = file.seek(0, os.SEEK_END), b""
                if not size:
                    self._make_room(path)
                elif size > self._limit_bytes:  # a clock that does not go on makes a day without an end
                    raise OSError(errno.EFBIG, f"has its {self._limit_bytes:,} bytes")
                elif (
                    file.seek(size - 1) >= 0 and file.read(1) != b"\n"
                ):  # cut by a loss of power, or a full disk
                    before = b"\n"
                if not size or self._written != (path, self.facts):
                    before += _line({"kind": "vehicle", "v": VERSION, **self.facts})
                file.write(before + _line(line))
                file.flush()
                self._written = path, self.facts
                if lasting:
                    os.fsync(file.fileno())
        except OSError as error:
            self.lost += 1
            self.problem = (
                f"records {path}: cannot be written: {error.strerror or error}; {self.lost} lines are lost"
            )
            return
        self.problem = ""

    def _make_room(self, newest: Path) -> None:
        files = [path for path in sorted(self._folder.glob(_PATTERN)) if path != newest]
        sizes = [path.stat().st_size for path in files]
        while files and sum(sizes) + max(sizes) > self._limit_bytes:
            files.pop(0).unlink()
            sizes.pop(0)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


@dataclass(frozen=True)
class Brought:
    """What vehicles brought home.

    Attributes:
        facts: of each vehicle, by its id.
        blocks: columns by the names of `Block`'s attributes, and `vehicle`: an index into `facts`, in its
            order.
        events: as they were written, with `vehicle`, an id; the oldest first.
        left_out: files or lines that could not be read, and why.
    """

    facts: Mapping[str, Mapping[str, Any]]
    blocks: Mapping[str, NDArray[Any]]
    events: Sequence[Mapping[str, Any]]
    left_out: Sequence[str]

    def until(self, now_s: float) -> "Brought":
        """Without minutes of the future: a clock that is wrong shows neither exposure nor an order."""
        late = self.blocks["t_s"] > now_s + _AHEAD_S
        if not late.any():
            return self
        ids = list(self.facts)
        names = ", ".join(sorted({ids[index] for index in self.blocks["vehicle"][late].tolist()}))
        left_out = f"{int(late.sum())} minutes of the future, of {names}: their clocks are ahead"
        blocks = {name: column[~late] for name, column in self.blocks.items()}
        return replace(self, blocks=blocks, left_out=[*self.left_out, left_out])

    def of_plan(self, plan: RolloutPlan) -> "Brought":
        """Without what another stage, or a roll-out of another name, has had of the plan's version.

        Lines that name neither, of earlier versions of this package, count as the plan's.
        """
        of_plan = {"stage": ("", plan.stage), "rollout": ("", plan.name)}
        version, count = self.blocks["version"] == plan.version, len(self.blocks["version"])
        own = np.all(
            [np.ones(count, bool), *(np.isin(self.blocks[name], of) for name, of in of_plan.items())],
            axis=0,
        )
        events = [one for one in self.events if all(one[name] in of for name, of in of_plan.items())]
        left_out, other = [*self.left_out], version & ~own
        if other.any():
            named = {
                f"{r} of stage {s}"
                for r, s in zip(self.blocks["rollout"][other], self.blocks["stage"][other], strict=True)
            }
            left_out.append(
                f"{int(other.sum())} minutes of version {plan.version} of other roll-outs: {', '.join(sorted(named))}"
            )
        blocks = {name: column[own] for name, column in self.blocks.items()}
        return replace(self, blocks=blocks, events=events, left_out=left_out)


_COLUMNS: Final = tuple(one.name for one in fields(Block))
_LATER: Final = {"stage": "", "rollout": ""}  # what lines of earlier versions do not have
_NEEDED: Final = frozenset(_COLUMNS) - _LATER.keys()
_KINDS: Final[dict[str, Any]] = {one.name: one.type for one in fields(Block)}
_OF_EVENTS: Final = frozenset(("t_s", "what", "version", "serial", "reason"))


def record_files(folders: Iterable[Path]) -> list[Path]:
    """Every file of records in these folders, wherever below; a file stands for itself."""
    return sorted(
        {found for path in folders for found in ([path] if path.is_file() else path.rglob(_PATTERN))}
    )


def read_records(
    files: Sequence[Path], progress: Callable[[int, int], None] = lambda done, of: None
) -> Brought:
    """Read what many vehicles wrote.

    What is damaged is left out and reported; a minute that is there twice counts once.

    One process reads, at 11 us a line: the day of 1,000 vehicles that drive for eight hours takes 5 s.
    Processes side by side took longer on two cores: 2.8 s for 144,000 lines, and 1.6 s in one.
    """
    parts: list[Brought] = []
    for path in files:
        parts.append(_read_file(path))
        progress(len(parts), len(files))
    facts: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, own in part.facts.items():
            facts.setdefault(name, {"vehicle": name}).update(own)
    ids = {name: index for index, name in enumerate(facts)}
    blocks = {
        name: np.concatenate([part.blocks[name] for part in parts] or [column])
        for name, column in _columns([]).items()
    }
    # A file is of one vehicle.
    owners = [np.full(len(part.blocks["t_s"]), ids.get(next(iter(part.facts), ""), -1)) for part in parts]
    blocks["vehicle"] = np.concatenate([*owners, np.empty(0, np.int64)]).astype(np.int64)
    # By drive: two nodes of a vehicle drive at the same time.
    whose = ("vehicle", "drive", "t_s", "version", "stage", "rollout")
    order = np.lexsort([blocks[name] for name in reversed(whose)])
    blocks = {name: column[order] for name, column in blocks.items()}
    again = np.all([blocks[name][1:] == blocks[name][:-1] for name in whose], axis=0)
    blocks = {name: column[np.append([True], ~again)[: len(column)]] for name, column in blocks.items()}
    events = {json.dumps(event, sort_keys=True): event for part in parts for event in part.events}
    return Brought(
        facts,
        blocks,
        sorted(events.values(), key=lambda event: float(event["t_s"])),
        [line for part in parts for line in part.left_out],
    )


def _read_file(path: Path) -> Brought:
    try:
        with open_regular(path) as file:
            text = file.read()
    except OSError as error:
        return Brought({}, _columns([]), [], [f"{path}: cannot be read: {error.strerror or error}"])
    vehicle, bad = path.parent.name, 0  # a file whose first line is lost goes by its folder
    own: dict[str, Any] = {}
    rows, events = [], []
    for line in filter(None, text.split(b"\n")):
        try:
            found = json.loads(line)
            kind = found.pop("kind")
            if kind == "vehicle":
                own, vehicle = found, str(found["vehicle"])
            elif kind == "event" and found.keys() >= _OF_EVENTS:
                events.append({**_LATER, **found, "t_s": float(found["t_s"])})
            elif kind == "minute" and found.keys() >= _NEEDED:
                found = {**_LATER, **found}
                rows.append([_value(name, found[name]) for name in _COLUMNS])
            else:
                bad += 1
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            bad += 1
    left_out = [f"{path}: {bad} {'lines are' if bad > 1 else 'line is'} damaged or cut"] if bad else []
    events = [{**event, "vehicle": vehicle} for event in events]
    return Brought({vehicle: own}, _columns(rows), events, left_out)


def _value(name: str, given: Any) -> Any:  # noqa: ANN401
    """A value of a minute as its column has it; a `ValueError` where no vehicle writes it."""
    kind = _KINDS[name]
    if kind is str:
        return str(given)
    value = math.nan if given is None else kind(given)
    is_known = kind is int or name == "t_s" or name.endswith("_sum_ms")
    if is_known and not (math.isfinite(value) and 0 <= value <= _LARGEST):
        raise ValueError(f"{name} {given!r}")
    return value


def _columns(rows: Sequence[Sequence[Any]]) -> dict[str, NDArray[Any]]:
    values = list(zip(*rows, strict=True)) if rows else [()] * len(_COLUMNS)
    return {
        name: np.array(own, dtype=np.str_ if _KINDS[name] is str else _KINDS[name])
        for name, own in zip(_COLUMNS, values, strict=True)
    }
