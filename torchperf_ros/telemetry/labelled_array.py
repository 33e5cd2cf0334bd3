"""A `std_msgs/Float64MultiArray` of fixed length whose entries are named by its layout, ready as bytes."""

from collections.abc import Sequence

import numpy as np

from torchperf_ros.core.message_types import encode, message_class

_TYPE = "std_msgs/msg/Float64MultiArray"


def float64_bytes(value: float) -> bytes:
    """CDR of a `std_msgs/Float64`."""
    return bytes(encode(message_class("std_msgs/msg/Float64")(data=value), "std_msgs/msg/Float64"))


class LabelledArray:
    """Encodes rows of numbers under labels that never change: only the numbers at the end of the bytes do."""

    def __init__(self, labels: Sequence[str]) -> None:
        """Lay the message out once: one dimension of size 1 per label."""
        dimension = message_class("std_msgs/msg/MultiArrayDimension")
        layout = message_class("std_msgs/msg/MultiArrayLayout")
        dims = [dimension(label=label, size=1, stride=1) for label in labels]
        message = message_class(_TYPE)(layout=layout(dim=dims, data_offset=0), data=np.zeros(len(labels)))
        self.labels = tuple(labels)
        self._prefix = bytes(encode(message, _TYPE))[: -8 * len(labels)]

    def encode(self, values: Sequence[float]) -> bytes:
        """CDR bytes with these values, one per label."""
        return self._prefix + np.array(values, dtype="<f8").tobytes()
