"""The pace of the player, on a clock that is set by hand."""

import pytest

pytest.importorskip("rclpy")

from torchperf_ros.core.message_types import decode
from torchperf_ros.demo.player import Tally, play
from torchperf_ros.demo.road_scene import ODOMETRY_TYPE, odometry_cdr
from torchperf_ros.replay.logs.log_reader import LogMessage

IMAGE_TYPE = "sensor_msgs/msg/Image"


class Player:
    """A player whose publishing takes as long as the test says."""

    def __init__(self, publish_ms: list[float]) -> None:
        self.now_ns = 0
        self.tally = Tally()
        self.published: list[tuple[float, str, float]] = []
        self._first_stamp_ns = 0
        self._publish_ms = iter(publish_ms)

    def play(self, messages: list[LogMessage], speed: float = 1.0, seconds: float = 1e6) -> None:
        play(iter(messages), speed, seconds, self._publish, self.tally, clock=lambda: self.now_ns, wait=self._wait)

    def _wait(self, seconds: float) -> None:
        self.now_ns += max(round(seconds * 1e9), 1)

    def _publish(self, kind: str, cdr: bytes) -> None:
        stamp = decode(cdr, ODOMETRY_TYPE).header.stamp
        stamp_ns = stamp.sec * 1_000_000_000 + stamp.nanosec
        self._first_stamp_ns = self._first_stamp_ns or stamp_ns
        self.published.append((self.now_ns / 1e6, kind, (stamp_ns - self._first_stamp_ns) / 1e6))
        self.now_ns += round(next(self._publish_ms, 0.0) * 1e6)


def message(at_ms: int, kind: str = IMAGE_TYPE) -> LogMessage:
    """A message due at a time; its bytes are odometry, the player looks at its header only."""
    return LogMessage("/t", kind, odometry_cdr(0.0), at_ms * 1_000_000)


def test_given_a_drive_when_played_then_each_message_goes_out_and_is_stamped_at_its_time() -> None:
    player = Player([])
    player.play([message(0), message(10, ODOMETRY_TYPE), message(33)])
    assert player.published == [
        (0.0, IMAGE_TYPE, 0.0),
        (10.0, ODOMETRY_TYPE, 10.0),
        (33.0, IMAGE_TYPE, 33.0),
    ]
    assert player.tally == Tally(images=2, odometries=1)


def test_given_a_slow_publish_when_played_then_it_is_counted_as_late_and_later_messages_are_back_on_time() -> None:
    player = Player([50.0, 1.0])
    player.play([message(0), message(33), message(66)])
    assert [at for at, _, _ in player.published] == [0.0, 50.0, 66.0]
    assert player.published[1][2] == 33.0
    assert (player.tally.late, player.tally.worst_late_ms) == (1, pytest.approx(17.0))


def test_given_double_speed_and_an_end_when_played_then_times_halve_and_nothing_goes_out_after_the_end() -> None:
    player = Player([])
    player.play([message(0), message(40), message(80)], speed=2.0, seconds=0.04)
    assert [at for at, _, _ in player.published] == [0.0, 20.0]
