"""The pace of the player, on a clock that is set by hand."""

import pytest

pytest.importorskip("rclpy")

from torchperf_ros.core.message_types import decode
from torchperf_ros.demo.log_source import LogMessage
from torchperf_ros.demo.player import Pace, Tally, play
from torchperf_ros.demo.road_scene import ODOMETRY_TYPE, odometry_cdr

IMAGE_TYPE = "sensor_msgs/msg/Image"
STAMP_NS = 50_000_000_000


class Player:
    """A player whose publishing takes as long as the test says."""

    def __init__(self, publish_ms: list[float]) -> None:
        self.now_ns = 0
        self.tally = Tally()
        self.published: list[tuple[float, str, int]] = []
        self._publish_ms = iter(publish_ms)

    def play(self, messages: list[LogMessage], speed: float = 1.0, end_ms: float = 1e6) -> None:
        play(
            iter(messages),
            Pace(0, STAMP_NS, speed),
            self._publish,
            self.tally,
            end_ns=round(end_ms * 1e6),
            clock_ns=lambda: self.now_ns,
            sleep=self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self.now_ns += max(round(seconds * 1e9), 1)

    def _publish(self, kind: str, cdr: bytes) -> None:
        stamp = decode(cdr, ODOMETRY_TYPE).header.stamp
        self.published.append((self.now_ns / 1e6, kind, stamp.sec * 1_000_000_000 + stamp.nanosec))
        self.now_ns += round(next(self._publish_ms, 0.0) * 1e6)


def message(at_ms: int, kind: str = IMAGE_TYPE) -> LogMessage:
    """A message due at a time; its bytes are odometry, the player looks at its header only."""
    return LogMessage("/t", kind, odometry_cdr(0.0), at_ms * 1_000_000)


def test_given_a_drive_when_played_then_each_message_goes_out_and_is_stamped_at_its_time() -> None:
    player = Player([])
    player.play([message(0), message(10, ODOMETRY_TYPE), message(33)])
    assert player.published == [
        (0.0, IMAGE_TYPE, STAMP_NS),
        (10.0, ODOMETRY_TYPE, STAMP_NS + 10_000_000),
        (33.0, IMAGE_TYPE, STAMP_NS + 33_000_000),
    ]
    assert player.tally == Tally(images=2, odometries=1)


def test_given_a_slow_publish_when_played_then_it_is_counted_as_late_and_later_messages_are_back_on_time() -> None:
    player = Player([50.0, 1.0])
    player.play([message(0), message(33), message(66)])
    assert [at for at, _, _ in player.published] == [0.0, 50.0, 66.0]
    assert player.published[1][2] == STAMP_NS + 33_000_000
    assert (player.tally.late, player.tally.worst_late_ms) == (1, pytest.approx(17.0))


def test_given_double_speed_and_an_end_when_played_then_times_halve_and_nothing_goes_out_after_the_end() -> None:
    player = Player([])
    player.play([message(0), message(40), message(80)], speed=2.0, end_ms=40)
    assert [at for at, _, _ in player.published] == [0.0, 20.0]
