"""The row of `/perf/latency_stages` that a frame leaves, and arrays whose layout names their entries."""

import math
import struct
from collections.abc import Sequence

import numpy as np

from torchperf_ros.api.messages import encode, message_class
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.frame_table import NULLABLE, WIRE, wire_row

_FLOAT64 = struct.Struct("<d")
_TYPE = "std_msgs/msg/Float64MultiArray"


def float64_bytes(value: float) -> bytes:
    """CDR of a `std_msgs/Float64`: little-endian encapsulation, then the number."""
    return b"\x00\x01\x00\x00" + _FLOAT64.pack(value)


class LabelledArray:
    """Encodes rows of numbers under labels that never change.

    Only the numbers at the end of the bytes do.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        dimension = message_class("std_msgs/msg/MultiArrayDimension")
        layout = message_class("std_msgs/msg/MultiArrayLayout")
        dims = [dimension(label=label, size=1, stride=1) for label in labels]
        message = message_class(_TYPE)(layout=layout(dim=dims, data_offset=0), data=np.zeros(len(labels)))
        numbers = struct.Struct(f"<{len(labels)}d")
        self.pack = numbers.pack  # makes those of the numbers
        self.prefix = bytes(encode(message, _TYPE))[: -numbers.size]  # the bytes before the numbers

    def encode(self, values: Sequence[float]) -> bytes:
        return self.prefix + self.pack(*values)


LABELS = ("stage", *(name for name, _ in WIRE), "stream")


class LatencyRecord:
    """Encodes answers of one stage, or of one stream of it.

    Attributes:
        stage_index: its place in the order in which `/diagnostics` names stages and streams.
    """

    def __init__(self, stage_index: int, stream: int | None = None) -> None:
        """`stream` is its number among those of its stage, None where that has none."""
        self.stage_index = stage_index
        self._stream = math.nan if stream is None else float(stream)
        array = LabelledArray(LABELS)
        self._prefix, self._pack = array.prefix, array.pack  # a call less for each frame

    def encode(self, answer: Answer) -> bytes:
        """CDR bytes of the row; NaN where unknown, where no fallback was needed, or without a guard."""
        return self._prefix + self._pack(self.stage_index, *wire_row(answer, math.nan), self._stream)

    def of_row(self, row: np.void) -> bytes:
        """The same bytes of a row of `KEPT`, which has -1 for what is unknown."""
        values = dict(zip(row.dtype.names or (), row.item(), strict=True))
        known = (math.nan if name in NULLABLE and values[name] < 0 else values[name] for name, _ in WIRE)
        return self._prefix + self._pack(self.stage_index, *known, self._stream)
