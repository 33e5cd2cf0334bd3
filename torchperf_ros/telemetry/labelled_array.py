"""A `std_msgs/Float64MultiArray` of fixed length whose entries are named by its layout, ready as bytes."""

import struct
from collections.abc import Sequence

import numpy as np

from torchperf_ros.core.message_types import encode, message_class

_FLOAT64 = struct.Struct("<d")
_TYPE = "std_msgs/msg/Float64MultiArray"


def float64_bytes(value: float) -> bytes:
    """CDR of a `std_msgs/Float64`: little-endian encapsulation, then the number."""
    return b"\x00\x01\x00\x00" + _FLOAT64.pack(value)


class LabelledArray:
    """Encodes rows of numbers under labels that never change: only the numbers at the end of the bytes do."""

    def __init__(self, labels: Sequence[str]) -> None:
        """Lay the message out once: one dimension of size 1 per label."""
        dimension = message_class("std_msgs/msg/MultiArrayDimension")
        layout = message_class("std_msgs/msg/MultiArrayLayout")
        dims = [dimension(label=label, size=1, stride=1) for label in labels]
        message = message_class(_TYPE)(layout=layout(dim=dims, data_offset=0), data=np.zeros(len(labels)))
        self.labels = tuple(labels)
        self._numbers = struct.Struct(f"<{len(labels)}d")
        self._prefix = bytes(encode(message, _TYPE))[: -self._numbers.size]

    def encode(self, values: Sequence[float]) -> bytes:
        """CDR bytes with these values, one per label."""
        return self._prefix + self._numbers.pack(*values)
