"""Headers with a stamp, built from nanoseconds."""

import functools
from typing import Any

from torchperf_ros.core.message_types import message_class

_NS_PER_S = 1_000_000_000


@functools.cache
def _classes() -> tuple[Any, Any]:
    return message_class("std_msgs/msg/Header"), message_class("builtin_interfaces/msg/Time")


def header(stamp_ns: int, frame_id: str) -> Any:  # noqa: ANN401 - rosbags builds the class at run time
    """A `std_msgs/msg/Header`.

    Args:
        stamp_ns: ROS time in ns, 0 for none.
        frame_id: coordinate frame.
    """
    header_class, time_class = _classes()
    sec, nanosec = divmod(stamp_ns, _NS_PER_S)
    return header_class(stamp=time_class(sec=sec, nanosec=nanosec), frame_id=frame_id)


def stamp_ns_of(message_header: Any) -> int:  # noqa: ANN401
    """The stamp of a `std_msgs/msg/Header` in ns."""
    return int(message_header.stamp.sec) * _NS_PER_S + int(message_header.stamp.nanosec)
