import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.observe.watch.alert_grouping import AlertGrouping, LastAlerts


def found(name, level=Level.WARN, message="it is", once=False, **values):
    return Alert(level, name, message, values, once=once)


class Grouping(AlertGrouping):
    """With times in seconds, and what was told by name."""

    def take(self, at_s, *anomalies):
        for anomaly in anomalies:
            self.report(anomaly, round(at_s * NS_PER_S))

    def told(self, at_s):
        return self.tick(round(at_s * NS_PER_S))


@pytest.fixture
def grouping():
    return Grouping()


def test_given_a_finding_when_ticked_then_it_is_told_once_with_its_numbers(grouping):
    grouping.take(0.2, found("a: deadline missed", total_ms="70"))
    [[told]] = grouping.told(1)
    assert (told.level, told.name, told.message) == (Level.WARN, "a: deadline missed", "it is")
    assert told.values == {
        "total_ms": "70",
        "event": "1",
        "since_s": "0.8",
        "count": "1",
        "held_back": "0",
        "also": "",
    }
    assert grouping.told(2) == []


def test_given_one_cause_when_several_things_are_found_then_they_are_one_message_with_the_cause_first(
    grouping,
):
    names = (
        "a: rollout",
        "a: misses",
        "b: deadline missed",
        "a: latency",
        "machine: load",
        "a: tier",
        "a: worker died",
    )
    grouping.take(0, *map(found, names), found("a: deadline missed", Level.ERROR), found("a: worker died"))
    [message] = grouping.told(1)
    assert [status.name for status in message] == [
        "a: worker died",
        "machine: load",
        "a: tier",
        "a: latency",
        "a: misses",
        "a: deadline missed",
        "b: deadline missed",
        "a: rollout",
    ]
    assert {status.values["event"] for status in message} == {"1"}
    assert message[-3].values["also"].startswith("a: worker died; machine: load; a: tier; ")


def test_given_an_event_when_more_is_found_soon_after_then_it_belongs_to_it_and_later_things_do_not(
    grouping,
):
    grouping.take(0, found("a: worker died"))
    grouping.told(1)
    grouping.take(4, found("a: deadline missed"))
    assert grouping.told(4.5)[0][0].values["event"] == "1"
    grouping.take(9, found("b: deadline missed"))
    assert grouping.told(10)[0][0].values["event"] == "2"


def test_given_what_goes_on_when_ticked_then_it_is_held_back_and_told_again_after_a_while(grouping):
    told = []
    for second in range(130):
        grouping.take(second, found("a: deadline missed"))
        told += [(second, message[0].values["held_back"]) for message in grouping.told(second)]
    assert told == [(0, "0"), (60, "59"), (120, "59")]


def test_given_what_grows_worse_when_ticked_then_it_is_told_at_once_and_getting_better_is_not(grouping):
    levels = [Level.WARN, Level.WARN, Level.ERROR, Level.WARN, Level.ERROR]
    told = []
    for second, level in enumerate(levels):
        grouping.take(second, found("a: deadline missed", level))
        told += [(second, message[0].level) for message in grouping.told(second)]
    assert told == [(0, Level.WARN), (2, Level.ERROR)]
    assert [(alert.name, alert.level) for alert in grouping.open] == [("a: deadline missed", Level.ERROR)]


def test_given_what_is_no_longer_found_when_quiet_then_it_is_told_that_it_is_over_and_may_begin_again(
    grouping,
):
    for second in (0, 1, 2):
        grouping.take(second, found("a: deadline missed"))
    grouping.told(2)
    assert grouping.told(11.9) == []
    [[over]] = grouping.told(12)
    assert (over.level, over.name) == (Level.OK, "a: deadline missed")
    assert over.values == {"event": "1", "lasted_s": "2.0", "count": "3"}
    assert grouping.open == []
    grouping.take(20, found("a: deadline missed"))
    assert grouping.told(20)[0][0].values["event"] == "2"


def test_given_more_than_it_holds_when_reported_then_the_rest_is_counted_not_kept(grouping):
    for number in range(1100):
        grouping.take(0, found(f"a: thing {number}"))
    grouping.told(1)
    assert grouping.lost == 1100 - len(grouping.open)
    assert len(grouping.open) <= 256


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.sampled_from(list(Level)[1:3])),
        max_size=60,
    )
)
def test_given_any_findings_when_time_has_passed_then_every_event_is_over_and_every_finding_counted(
    findings,
):
    grouping = Grouping()
    counted = 0
    for second in range(60):
        for at, name, level in findings:
            if at == second:
                grouping.take(second, found(f"s: {name}", level))
        over = [message[0] for message in grouping.told(second) if message[0].level is Level.OK]
        counted += sum(int(status.values["count"]) for status in over)
    assert counted == len(findings)
    assert grouping.open == []


def test_given_findings_when_the_recorder_is_silent_then_they_go_on_for_a_while_or_until_it_looks_and_finds_nothing():
    last, latency = LastAlerts(), [found("camera: latency")]
    assert last.update(latency, 0, looked=True) == latency
    assert [bool(last.update([], second * NS_PER_S, looked=False)) for second in (1, 20, 21)] == [
        True,
        True,
        False,
    ]
    last.update(latency, 30 * NS_PER_S, looked=True)
    assert not last.update([], 31 * NS_PER_S, looked=True)
    assert (
        last.update(latency, 32 * NS_PER_S, looked=False) == latency
    )  # heard before its status: the same look
