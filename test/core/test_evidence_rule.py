import pytest

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.evidence_rule import EvidenceRule

S = 1_000_000_000
STAGES = ("perception", "planning")


@pytest.mark.parametrize(
    ("level", "name", "wanted"),
    [
        (Level.ERROR, "perception: deadline missed", ("perception", "profile")),
        (Level.ERROR, "planning: latency", ("planning", "profile")),
        (Level.WARN, "perception: deadline missed", None),
        (Level.WARN, "perception: memory grows", ("perception", "memory")),
        (Level.ERROR, "perception: memory grows", ("perception", "memory")),
        (Level.OK, "perception: memory grows", None),
        (Level.STALE, "perception: deadline missed", None),
        (Level.WARN, "node: memory grows", ("perception", "memory")),
        (Level.WARN, "node: load", None),
        (Level.ERROR, "unknown", None),
    ],
)
def test_given_an_event_when_told_then_it_asks_for_what_helps(level, name, wanted):
    assert EvidenceRule().wanted(Anomaly(level, name, ""), STAGES, 0) == wanted


def test_given_errors_that_keep_coming_when_told_then_each_stage_and_kind_is_asked_for_once_in_a_while():
    rule = EvidenceRule(every_s=600.0)
    error = Anomaly(Level.ERROR, "perception: deadline missed", "")
    asked = [second for second in range(0, 1900, 10) if rule.wanted(error, STAGES, second * S)]
    assert asked == [0, 600, 1200, 1800]
    assert rule.wanted(Anomaly(Level.ERROR, "planning: deadline missed", ""), STAGES, 1801 * S)
    assert rule.wanted(Anomaly(Level.WARN, "perception: memory grows", ""), STAGES, 1801 * S)
    assert not rule.wanted(Anomaly(Level.ERROR, "perception: model error", ""), STAGES, 1801 * S)


def test_given_a_node_without_stages_when_its_memory_grows_then_there_is_nobody_to_ask():
    assert EvidenceRule().wanted(Anomaly(Level.WARN, "node: memory grows", ""), (), 0) is None
