import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.frame.outcome import Health, Outcome
from torchperf_ros.frame.stage_counters import StageCounters
from torchperf_ros.frame.stage_figures import NO_TIER, StageFigures

MS, S = 1_000_000, 1_000_000_000
TIERS = ("full", "fast")


class Stage:
    """A stage's numbers on a clock of the test's own."""

    def __init__(self, window_s=10.0, budget_ms=50.0):
        self.now_ns = S
        self.counters = StageCounters()
        self.figures = StageFigures(self.counters, TIERS, budget_ms, window_s, self.now_ns)

    def answer(self, total_ms, *, after_ms=33.0, tier=0, outcome=Outcome.ON_TIME, lateness_ms=-1.0, age_ms=4.0):
        self.now_ns += round(after_ms * MS)
        frame = Frame(0, b"", 5, age_ms, self.now_ns, 0, Origin(self.now_ns, math.nan))
        self.counters.received(self.now_ns, 5, age_ms, stamped=True)
        steps = StepTimes(1.0, 2.0, 3.0, 4.0)
        self.counters.add(Answer(frame, outcome, None, "", tier, 0.5, total_ms, 50.0, lateness_ms, self.now_ns, steps))

    def activate(self):
        self.now_ns += S
        self.counters.activated_ns = self.now_ns

    def read(self, health=Health.NOMINAL):
        return self.figures.read(self.now_ns, health)


answers = st.tuples(st.floats(0.01, 500.0), st.floats(0.0, 900.0), st.integers(-1, 1))


@given(batches=st.lists(st.lists(answers, max_size=12), min_size=1, max_size=5), window_s=st.floats(1.0, 4.0))
def test_given_any_answers_when_read_then_numpy_says_the_same_of_the_window_and_the_run(batches, window_s):
    stage, seen = Stage(window_s), []
    for batch in batches:
        for total_ms, after_ms, tier in batch:
            stage.answer(total_ms, after_ms=after_ms, tier=tier)
            seen.append((stage.now_ns, total_ms, tier))
        reading = stage.read()
        recent = [row for row in seen if row[0] >= stage.now_ns - round(window_s * S)]
        for spans, tiers in (
            (reading.latency, {-1, 0, 1}), (reading.tiers["full"], {0}), (reading.tiers["fast"], {1}),
            (reading.tiers[NO_TIER], {-1}),
        ):  # fmt: skip
            window_ms = [total_ms for _, total_ms, tier in recent if tier in tiers]
            run_ms = [total_ms for _, total_ms, tier in seen if tier in tiers]
            assert (spans.window.count, spans.run.count, spans.active.count) == (len(window_ms), len(run_ms), 0)
            if window_ms:
                exact = np.percentile(window_ms, [50, 95, 99, 100])
                assert [value for _, value in spans.window.items()] == pytest.approx(exact)
            if run_ms:
                assert spans.run.p99_ms == pytest.approx(np.percentile(run_ms, 99, method="lower"), rel=0.0101)
                assert spans.run.max_ms == max(run_ms)
        intervals_ms = np.diff([at_ns for at_ns, _, _ in recent]) / MS
        if len(intervals_ms):
            assert reading.interval_ms == pytest.approx(np.mean(intervals_ms), abs=1e-6)
            assert reading.interval_jitter_ms == pytest.approx(np.std(intervals_ms), abs=1e-5)
            steps_ms = np.abs(np.diff([total_ms for _, total_ms, _ in recent]))
            assert reading.latency_jitter_ms == pytest.approx(np.mean(steps_ms))


def test_given_nothing_when_read_then_everything_is_unknown():
    reading = Stage().read()
    assert reading.latency.window.count == reading.unrecorded == 0
    unknown = (reading.latency.miss_ratio, reading.interval_ms, reading.interval_jitter_ms, reading.latency_jitter_ms)
    for value in (*unknown, reading.age.p99_ms, reading.wait.p50_ms, reading.lateness.max_ms):
        assert math.isnan(value)


def test_given_one_answer_when_read_then_there_is_no_jitter_yet():
    stage = Stage()
    stage.answer(10.0)
    reading = stage.read()
    assert reading.latency.window.p99_ms == 10.0
    assert math.isnan(reading.interval_jitter_ms)
    assert math.isnan(reading.latency_jitter_ms)


def test_given_misses_when_read_then_age_wait_lateness_and_the_ratio_are_of_the_window():
    stage = Stage(window_s=1.0)
    for _ in range(3):
        stage.answer(60.0, outcome=Outcome.LATE, lateness_ms=10.0)
    stage.now_ns += 2 * S
    stage.answer(60.0, outcome=Outcome.LATE, lateness_ms=3.0, age_ms=math.nan)
    for _ in range(3):
        stage.answer(20.0, age_ms=6.0)
    reading = stage.read()
    assert reading.latency.miss_ratio == reading.tiers["full"].miss_ratio == 0.25
    assert math.isnan(reading.tiers["fast"].miss_ratio)
    assert reading.lateness.max_ms == 3.0
    assert (reading.age.count, reading.age.p50_ms) == (3, 6.0)
    assert reading.wait.p99_ms == 0.5


def test_given_a_stage_that_is_activated_again_when_read_then_that_span_begins_anew_and_the_run_goes_on():
    stage = Stage()
    stage.answer(10.0)
    stage.activate()
    stage.answer(20.0)
    assert stage.read().latency.active.max_ms == 20.0
    stage.answer(40.0)
    stage.activate()  # what was answered before and not read yet stays before
    stage.answer(30.0)
    latency = stage.read().latency
    assert (latency.active.count, latency.active.max_ms) == (1, 30.0)
    assert (latency.run.count, latency.run.max_ms) == (4, 40.0)


def test_given_health_when_looked_at_then_the_time_until_then_belongs_to_the_state_before():
    stage = Stage()
    stage.now_ns += 2 * S
    stage.read(Health.NOMINAL)
    stage.now_ns += 3 * S
    stage.read(Health.SAFE_STOP)
    stage.now_ns += S
    seconds = stage.read(Health.SAFE_STOP).health_s
    assert seconds == {
        Health.STARTING: 2.0, Health.WAITING: 0.0, Health.NOMINAL: 3.0, Health.DEGRADED: 0.0, Health.SAFE_STOP: 1.0
    }  # fmt: skip


def test_given_nobody_who_reads_when_rows_are_pushed_out_then_they_are_counted_and_memory_is_bounded():
    stage = Stage()
    most = stage.counters.answers.maxlen
    for _ in range(most + 5):
        stage.answer(10.0, after_ms=1.0)
    assert len(stage.counters.answers) == len(stage.counters.receipts) == most
    reading = stage.read()
    assert reading.unrecorded == 10
    assert reading.latency.run.count == most
    stage.answer(10.0)
    assert stage.read().unrecorded == 10


def test_given_answers_when_read_then_histograms_hold_them_by_tier_lateness_and_step():
    stage = Stage(budget_ms=50.0)
    stage.answer(20.0)
    stage.answer(50.0)
    stage.answer(50.1, lateness_ms=0.1, outcome=Outcome.LATE)
    stage.answer(7.0, tier=1)
    stage.read()
    tiers, (lateness, late_s), steps = stage.figures.histograms()
    by_bound = dict(tiers["full"][0])
    assert (by_bound["0.02"], by_bound["0.05"], by_bound["+Inf"]) == (1, 2, 3)
    assert tiers["full"][1] == pytest.approx(0.1201)
    assert dict(tiers["fast"][0])["+Inf"] == 1
    assert dict(tiers[NO_TIER][0])["+Inf"] == 0
    assert (lateness[0], late_s) == (("0.0", 3), pytest.approx(1e-4))
    assert {step: total_s for step, (_, total_s) in steps.items()} == pytest.approx(
        {"wait": 0.002, "decode": 0.004, "preprocess": 0.008, "inference": 0.012, "postprocess": 0.016}
    )


def test_given_a_changed_window_when_read_then_it_holds_at_once():
    stage = Stage(window_s=10.0)
    stage.answer(10.0)
    stage.now_ns += 3 * S
    stage.answer(20.0)
    assert stage.read().latency.window.count == 2
    stage.figures.window_s = 1.0
    assert stage.read().latency.window.count == 1
