"""Answered frames as rows of a file: as many as come, in memory that does not grow."""

import hashlib
import tempfile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.health import Flow

_WHOLE, _REAL = "i8", "f8"
# The columns of an answered frame, in the order in which `/perf/latency_stages` has them after
# `stage`.
WIRE: Final = (
    ("seq", _WHOLE), ("age_ms", _REAL), ("wait_ms", _REAL), ("decode_ms", _REAL), ("preprocess_ms", _REAL),
    ("inference_ms", _REAL), ("postprocess_ms", _REAL), ("total_ms", _REAL), ("budget_ms", _REAL), ("tier", _WHOLE),
    ("outcome", _WHOLE), ("fallback", _WHOLE), ("check", _WHOLE), ("scene", _WHOLE), ("missing_inputs", _WHOLE),
    ("deadline_ms", _REAL), ("lateness_ms", _REAL), ("stale", _WHOLE),
)  # fmt: skip
# The same with the ROS time of the answer, the trigger's stamp, and the end-to-end latency of the
# last stage.
KEPT: Final = (*WIRE, ("t_ns", _WHOLE), ("stamp_ns", _WHOLE), ("answer_ms", _REAL))
# Of the columns whose name does not say it all.
MEANINGS: Final = {
    "age_ms": "stamp to receipt",
    "wait_ms": "in the mailbox, and for synchronised inputs",
    "total_ms": "receipt to publish",
    "tier": "null: none was started",
    "check": "the guard's verdict; null: the stage has no guard",
    "scene": "place in the parameter scenes from 1 on, 0 is default",
    "missing_inputs": "synchronised inputs without a message that fits the frame: bit n is the adapter's input n",
    "deadline_ms": "from receipt to the deadline: the budget less the part that had passed by then",
    "lateness_ms": "after (positive) or before the deadline; no reader computes it again",
    "stale": "whether the deadline had passed when its turn came",
    "stamp_ns": "header.stamp of the trigger, 0 if it has none",
    "answer_ms": "end to end, of the last stage's frames",
}
# A frame's row in a table: indexes -1 and times NaN where unknown or not needed.
#
# `output_hash`: of the published bytes, 0 where nothing was published.
FRAME: Final = np.dtype([*KEPT, ("output_hash", "u8")])
# Indexes that a frame may not have: -1 in a row, NaN in `/perf/latency_stages`.
NULLABLE: Final = frozenset({"tier", "fallback", "check"})
_NONE: Final = -1
_INPUTS: Final = 2**63 - 1
_ROWS_AT_ONCE: Final = 4096


def flow_of(frames: NDArray[np.void], superseded: int) -> Flow:
    """The flow through a stage over these rows of `FRAME`, without any that had no answer."""
    busy_ms: NDArray[np.float64] = frames["total_ms"] - np.nan_to_num(frames["wait_ms"])
    span_ns = int(np.ptp(frames["t_ns"])) if len(frames) else 0
    return Flow(span_ns, len(frames) + superseded, superseded, len(frames), float(np.nansum(busy_ms)))


def output_hash(payload: bytes | None) -> int:
    """The first 63 bits of the BLAKE2b of an output; 0 for none. Parquet and JSON hold it without loss."""
    if payload is None:
        return 0
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little") >> 1


def wire_row(answer: Answer, none: float = _NONE) -> tuple[float, ...]:
    """A frame's values in the order of `WIRE`.

    `none` stands for a tier, fallback or verdict that there is not.
    """
    frame, steps, fallback, check = answer.frame, answer.steps, answer.fallback, answer.check
    return (
        frame.seq,
        frame.age_ms,
        answer.wait_ms,
        steps.decode_ms,
        steps.preprocess_ms,
        steps.inference_ms,
        steps.postprocess_ms,
        answer.total_ms,
        answer.budget_ms,
        answer.tier if answer.tier >= 0 else none,
        answer.outcome,
        none if fallback is None else fallback,
        none if check is None else check,
        frame.scene,
        answer.missing_inputs & _INPUTS,
        answer.total_ms - answer.lateness_ms,
        answer.lateness_ms,
        frame.stale,
    )


def frame_row(answer: Answer, t_ns: int, answer_ms: float) -> tuple[float, ...]:
    """A frame's values in the order of `KEPT`: all but the hash of its output, which takes time."""
    return (*wire_row(answer), t_ns, answer.frame.stamp_ns, answer_ms)


class FrameTable:
    """Rows of `FRAME`, appended to a temporary file that goes with the object."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="torchperf_frames_")  # noqa: SIM115 - closed by `close`
        self._rows: list[tuple[float, ...]] = []
        self._written = 0

    def add(self, answer: Answer, t_ns: int, answer_ms: float) -> None:
        """Append a frame's row, see `FRAME`."""
        self._rows.append((*frame_row(answer, t_ns, answer_ms), output_hash(answer.payload)))
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        self._file.write(np.array(self._rows, dtype=FRAME).tobytes())
        self._written += len(self._rows)
        self._rows.clear()

    def __len__(self) -> int:
        return self._written + len(self._rows)

    def rows(self) -> NDArray[np.void]:
        """Every row so far, mapped from the file; not for changing."""
        if self._rows:
            self._flush()
        self._file.flush()
        if not self._written:
            return np.empty(0, dtype=FRAME)
        return np.memmap(self._file, dtype=FRAME, mode="r", shape=(self._written,))

    def close(self) -> None:
        """Remove the file; rows that were mapped stay as they are."""
        self._file.close()
