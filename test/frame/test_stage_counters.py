import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.outcome import Fallback, Outcome
from torchperf_ros.frame.stage_counters import AnswerColumn, ReceiptColumn, StageCounters


def test_given_a_new_stage_when_asked_then_nothing_was_missed():
    assert StageCounters().miss_ratio == 0.0


def test_given_answers_when_added_then_each_is_counted_by_outcome_and_fallback(make_answer):
    statistics = StageCounters()
    statistics.add(make_answer(Outcome.ON_TIME))
    statistics.add(make_answer(Outcome.LATE, Fallback.HOLD_LAST, lateness_ms=0.1, total_ms=50.1))
    statistics.add(make_answer(Outcome.CRASHED, Fallback.BACKUP))
    statistics.add(make_answer(Outcome.LATE, Fallback.HOLD_LAST, lateness_ms=0.0))
    assert statistics.answered == 4
    assert statistics.outcomes[Outcome.LATE] == 2
    assert statistics.fallbacks[Fallback.HOLD_LAST] == 2
    assert statistics.fallbacks[Fallback.BACKUP] == 1
    assert statistics.missed_deadline == 1
    assert statistics.miss_ratio == 0.75
    assert [row[AnswerColumn.TOTAL_MS] for row in statistics.answers] == [10.0, 50.1, 10.0, 10.0]
    assert [row[AnswerColumn.LATENESS_MS] for row in statistics.answers] == [-1.0, 0.1, -1.0, 0.0]
    assert [row[AnswerColumn.NUMBER] for row in statistics.answers] == [1, 2, 3, 4]
    assert {len(row) for row in statistics.answers} == {len(AnswerColumn)}


@pytest.mark.parametrize(
    ("stamps_ns", "ages_ms", "counts"),
    [
        ([1, 2, 3], [5, 5, 5], (0, 0, 0, 0)),
        ([0, 0], [math.nan, math.nan], (2, 0, 0, 0)),
        ([5, 4], [5, 5], (0, 0, 1, 0)),
        ([5, 5], [5, 5], (0, 0, 0, 1)),
        ([5, 0, 5], [5, math.nan, 5], (1, 0, 0, 1)),
        ([5], [-0.1], (0, 1, 0, 0)),
    ],
)
def test_given_stamps_when_received_then_what_is_odd_about_them_is_counted(stamps_ns, ages_ms, counts):
    statistics = StageCounters()
    for stamp_ns, age_ms in zip(stamps_ns, ages_ms, strict=True):
        statistics.received(7, stamp_ns, age_ms, stamped=True)
    found = (statistics.zero_stamps, statistics.future_stamps, statistics.backward_stamps, statistics.repeated_stamps)
    assert found == counts
    assert statistics.frames == len(stamps_ns)


def test_given_a_type_without_a_stamp_when_received_then_only_the_frame_is_counted():
    statistics = StageCounters()
    for _ in range(3):
        statistics.received(7, 0, math.nan, stamped=False)
    assert statistics.frames == 3
    assert statistics.zero_stamps == statistics.repeated_stamps == 0
    assert [row[ReceiptColumn.NUMBER] for row in statistics.receipts] == [1, 2, 3]
    assert {row[ReceiptColumn.RECEIVED_NS] for row in statistics.receipts} == {7}


@given(st.lists(st.tuples(st.sampled_from(Outcome), st.sampled_from([None, *Fallback])), max_size=60))
def test_given_any_answers_when_added_then_the_counters_add_up(pairs):
    from torchperf_ros.frame.frame import Answer, Frame, Origin

    statistics = StageCounters()
    for outcome, fallback in pairs:
        frame = Frame(0, b"", 0, 0.0, 0, 0, Origin(0, 0.0))
        statistics.add(Answer(frame, outcome, fallback, "", 0, 0.0, 1.0, 1.0, 0.0, 0))
    assert sum(statistics.outcomes) == statistics.answered + statistics.unanswered == len(pairs)
    assert statistics.unanswered == statistics.fallbacks[Fallback.NONE]
    assert [row[AnswerColumn.NUMBER] for row in statistics.answers] == list(range(1, len(pairs) + 1))
    assert sum(statistics.fallbacks) == sum(fallback is not None for _, fallback in pairs)
    on_time = sum(outcome is Outcome.ON_TIME for outcome, _ in pairs)
    assert statistics.miss_ratio == pytest.approx(1 - on_time / len(pairs) if pairs else 0.0)
