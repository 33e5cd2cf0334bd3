"""The node's log: a storm of lines is cut."""

from types import SimpleNamespace

import pytest

pytest.importorskip("rclpy")

from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.node.alert_publisher import NodeLog


class Log(NodeLog):
    """Without a node; time in seconds."""

    def __init__(self):
        self.now_s, self.lines = 0.0, []
        logger = SimpleNamespace(info=self.lines.append)
        node = SimpleNamespace(get_logger=lambda: logger)
        super().__init__(node, SimpleNamespace(recording=None), lambda: round(self.now_s * NS_PER_S))


def test_given_a_storm_when_logged_then_it_is_cut_and_what_was_left_out_is_said_with_the_next():
    log = Log()
    for number in range(100):
        log("info", str(number))
    assert log.lines == [str(number) for number in range(30)]
    log.now_s = 1.0
    log("info", "after")
    log("info", "then")
    assert "70 lines were left out" in log.lines[30]
    assert log.lines[31:] == ["after", "then"]


def test_given_a_storm_that_lasts_when_logged_then_ten_lines_a_second_remain():
    log = Log()
    for number in range(10_000):  # 100 a second for 100 s
        log.now_s = number / 100
        log("info", "x")
    assert abs(log.lines.count("x") - (30 + 10 * 100)) <= 1
