import pytest

from torchperf_ros.frame.alert_rules import Alert, Level
from torchperf_ros.recorder.incident_folder import CaptureRule

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
    assert CaptureRule().wanted(Alert(level, name, ""), STAGES, 0) == wanted


def test_given_errors_that_keep_coming_when_told_then_each_stage_and_kind_is_asked_for_once_in_a_while():
    rule = CaptureRule(every_s=600.0, apart_s=60.0)
    error = Alert(Level.ERROR, "perception: deadline missed", "")
    taken = []
    for second in range(0, 1900, 10):
        if wanted := rule.wanted(error, STAGES, second * S):
            rule.taken(*wanted, second * S)
            taken.append(second)
    assert taken == [0, 600, 1200, 1800]
    others = (Alert(Level.ERROR, "planning: latency", ""), Alert(Level.WARN, "perception: memory grows", ""))
    assert [rule.wanted(other, STAGES, 1859 * S) for other in others] == [None, None]
    assert [rule.wanted(other, STAGES, 1860 * S) for other in others] == [
        ("planning", "profile"),
        ("perception", "memory"),
    ]
    assert not rule.wanted(Alert(Level.ERROR, "perception: model error", ""), STAGES, 1860 * S)


def test_given_evidence_that_could_not_be_taken_when_the_event_is_told_again_then_it_is_wanted_still():
    rule = CaptureRule()
    error = Alert(Level.ERROR, "perception: deadline missed", "")
    assert rule.wanted(error, STAGES, 0)
    assert rule.wanted(error, STAGES, S)


def test_given_a_node_without_stages_when_its_memory_grows_then_there_is_nobody_to_ask():
    assert CaptureRule().wanted(Alert(Level.WARN, "node: memory grows", ""), (), 0) is None
