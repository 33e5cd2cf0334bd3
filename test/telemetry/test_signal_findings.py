from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.telemetry.signal_findings import LastFindings

FOUND = [Anomaly(Level.WARN, "camera: latency", "slow")]


def test_given_findings_when_the_recorder_is_silent_then_they_go_on_for_a_while():
    last = LastFindings()
    assert last.update(FOUND, 0, looked=True) == FOUND
    assert [bool(last.update([], second * NS_PER_S, looked=False)) for second in (1, 20, 21)] == [True, True, False]


def test_given_findings_when_the_recorder_looks_and_finds_nothing_then_they_are_over():
    last = LastFindings()
    last.update(FOUND, 0, looked=True)
    assert not last.update([], NS_PER_S, looked=True)
    assert last.update(FOUND, 2 * NS_PER_S, looked=False) == FOUND  # heard before its status: the same look
