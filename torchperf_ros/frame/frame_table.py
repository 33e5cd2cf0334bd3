"""Answered frames as rows of a file: as many as come, in memory that does not grow."""

import hashlib
import tempfile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.frame.frame import Answer

FRAME: Final = np.dtype(
    [
        ("seq", "i8"), ("t_ns", "i8"), ("stamp_ns", "i8"), ("tier", "i8"), ("outcome", "i8"), ("fallback", "i8"),
        ("age_ms", "f8"), ("wait_ms", "f8"), ("decode_ms", "f8"), ("preprocess_ms", "f8"), ("inference_ms", "f8"),
        ("postprocess_ms", "f8"), ("total_ms", "f8"), ("budget_ms", "f8"), ("lateness_ms", "f8"), ("answer_ms", "f8"),
        ("check", "i8"), ("missing_inputs", "i8"), ("output_hash", "u8"),
    ]
)  # fmt: skip
"""A frame's row: as in `/perf/latency_stages`; indexes -1 and times NaN where unknown or not needed.

`t_ns`: ROS time of the answer. `answer_ms`: end to end, of the last stage's frames. `missing_inputs`: bit n is the
adapter's input n. `output_hash`: of the published bytes, 0 where nothing was published.
"""
_NONE: Final = -1
_ROWS_AT_ONCE: Final = 4096


def output_hash(payload: bytes | None) -> int:
    """The first 63 bits of the BLAKE2b of an output; 0 for none. Parquet and JSON hold it without loss."""
    if payload is None:
        return 0
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little") >> 1


def frame_row(answer: Answer, t_ns: int, answer_ms: float) -> tuple[float, ...]:
    """A frame's row, see `FRAME`, but for the hash of its output, which takes time."""
    frame, steps = answer.frame, answer.steps
    return (
        frame.seq, t_ns, frame.stamp_ns, answer.tier, answer.outcome,
        _NONE if answer.fallback is None else answer.fallback, frame.age_ms, answer.wait_ms,
        steps.decode_ms, steps.preprocess_ms, steps.inference_ms, steps.postprocess_ms,
        answer.total_ms, answer.budget_ms, answer.lateness_ms, answer_ms,
        _NONE if answer.check is None else answer.check, answer.missing_inputs,
    )  # fmt: skip


class FrameTable:
    """Rows of `FRAME`, appended to a temporary file that goes with the object."""

    def __init__(self) -> None:
        """Make the file, in the system's temporary folder."""
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
