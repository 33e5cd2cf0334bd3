from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.node.alert_publisher import LogThrottle


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return round(self.now_s * NS_PER_S)


def test_given_a_few_lines_when_logged_then_each_is_there():
    throttle = LogThrottle(Clock())
    assert [throttle.lines(str(number)) for number in range(30)] == [[str(number)] for number in range(30)]


def test_given_a_storm_when_logged_then_it_is_cut_and_what_was_left_out_is_said_with_the_next():
    clock = Clock()
    throttle = LogThrottle(clock)
    said = [line for number in range(100) for line in throttle.lines(str(number))]
    assert said == [str(number) for number in range(30)]
    clock.now_s = 1.0
    note, line = throttle.lines("after")
    assert "70 lines were left out" in note
    assert line == "after"
    assert throttle.lines("then") == ["then"]


def test_given_a_storm_that_lasts_when_logged_then_ten_lines_a_second_remain():
    clock = Clock()
    throttle = LogThrottle(clock)
    logged = 0
    for number in range(10_000):  # 100 a second for 100 s
        clock.now_s = number / 100
        logged += bool(throttle.lines("x"))
    assert abs(logged - (30 + 10 * 100)) <= 1
