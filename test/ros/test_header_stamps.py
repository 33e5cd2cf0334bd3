"""Headers that get another time; needs no ROS."""

import struct

from torchperf_ros.core.frame import header_stamp_ns
from torchperf_ros.replay.logs.log_reader import LogMessage
from torchperf_ros.ros.header_stamps import HeaderStamps

POINT = "geometry_msgs/msg/PointStamped"
HEADER = b"\x00\x01\x00\x00" + struct.pack("<iI", 3, 5) + bytes(8)
S = 1_000_000_000


def message(data, t_s=100, topic="/point"):
    return LogMessage(topic=topic, type_name=POINT, data=data, t_ns=t_s * S)


def test_given_headers_when_stamped_then_those_of_the_topics_get_the_log_s_time():
    stamps = HeaderStamps({"/point"}, log_time=True)
    assert header_stamp_ns(stamps.stamp(message(HEADER), 0).data) == 100 * S
    assert stamps.stamp(message(HEADER, topic="/other"), 0).data == HEADER
    assert (stamps.kept, stamps.summary()) == (0, "")


def test_given_messages_that_cannot_be_stamped_when_played_then_they_go_on_as_they_are_and_are_counted_once():
    stamps = HeaderStamps({"/point"}, log_time=True)
    short, late = message(HEADER[:8]), message(HEADER, t_s=2**31)
    assert [stamps.stamp(each, 0) for each in (short, short, late)] == [short, short, late]  # a pause came between
    assert stamps.kept == 2
    assert stamps.summary().startswith("2 messages were not restamped: too short for a header")
