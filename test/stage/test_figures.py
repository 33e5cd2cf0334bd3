import math
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.alert import Level
from torchperf_ros.api.clock import NS_PER_S, VirtualClock
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.figures import (
    ANSWER,
    LATENESS_BOUNDS_S,
    NO_TIER,
    RECEIPT,
    RELATIVE_ERROR,
    BucketCounts,
    LatencyFigures,
    LatencySketch,
    Quantiles,
    RecentRows,
    StageCounters,
    StageStatistics,
    budget_bounds_s,
)
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes

MS, S = 1_000_000, 1_000_000_000
TIERS = ("full", "fast")


class Stage:
    """A stage's numbers on a clock of the test's own."""

    def __init__(self, window_s=10.0, budget_ms=50.0):
        self.now_ns = S
        self.counters = StageCounters()
        self.figures = LatencyFigures(self.counters, TIERS, budget_ms, window_s, self.now_ns)

    def answer(
        self, total_ms, *, after_ms=33.0, tier=0, outcome=Outcome.ON_TIME, lateness_ms=-1.0, age_ms=4.0
    ):
        self.now_ns += round(after_ms * MS)
        frame = Frame(0, b"", 5, age_ms, self.now_ns, 0, Origin(self.now_ns, math.nan))
        self.counters.received(self.now_ns, 5, age_ms, stamped=True)
        steps = StepTimes(1.0, 2.0, 3.0, 4.0)
        self.counters.add(
            Answer(frame, outcome, None, "", tier, 0.5, total_ms, 50.0, lateness_ms, self.now_ns, steps)
        )

    def activate(self):
        self.now_ns += S
        self.counters.activated_ns = self.now_ns

    def read(self, health=Health.NOMINAL):
        return self.figures.read(self.now_ns, health)


answers = st.tuples(st.floats(0.01, 500.0), st.floats(0.0, 900.0), st.integers(-1, 1))


@given(
    batches=st.lists(st.lists(answers, max_size=12), min_size=1, max_size=5), window_s=st.floats(1.0, 4.0)
)
def test_given_any_answers_when_read_then_numpy_says_the_same_of_the_window_and_the_run(batches, window_s):
    stage, seen = Stage(window_s), []
    for batch in batches:
        for total_ms, after_ms, tier in batch:
            stage.answer(total_ms, after_ms=after_ms, tier=tier)
            seen.append((stage.now_ns, total_ms, tier))
        reading = stage.read()
        recent = [row for row in seen if row[0] >= stage.now_ns - round(window_s * S)]
        for spans, tiers in (
            (reading.latency, {-1, 0, 1}),
            (reading.tiers["full"], {0}),
            (reading.tiers["fast"], {1}),
            (reading.tiers[NO_TIER], {-1}),
        ):
            window_ms = [total_ms for _, total_ms, tier in recent if tier in tiers]
            run_ms = [total_ms for _, total_ms, tier in seen if tier in tiers]
            assert (spans.window.count, spans.run.count, spans.active.count) == (
                len(window_ms),
                len(run_ms),
                0,
            )
            if window_ms:
                exact = np.percentile(window_ms, [50, 95, 99, 100])
                assert [value for _, value in spans.window.items()] == pytest.approx(exact)
            if run_ms:
                assert spans.run.p99_ms == pytest.approx(
                    np.percentile(run_ms, 99, method="lower"), rel=0.0101
                )
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
    unknown = (
        reading.latency.miss_ratio,
        reading.interval_ms,
        reading.interval_jitter_ms,
        reading.latency_jitter_ms,
    )
    for value in (*unknown, reading.age.p99_ms, reading.wait.p50_ms, reading.lateness.max_ms):
        assert math.isnan(value)


@pytest.fixture
def stage():
    return Stage()


def test_given_one_answer_when_read_then_there_is_no_jitter_yet(stage):
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


def test_given_a_stage_that_is_activated_again_when_read_then_that_span_begins_anew_and_the_run_goes_on(
    stage,
):
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


def test_given_health_when_looked_at_then_the_time_until_then_belongs_to_the_state_before(stage):
    stage.now_ns += 2 * S
    stage.read(Health.NOMINAL)
    stage.now_ns += 3 * S
    stage.read(Health.SAFE_STOP)
    stage.now_ns += S
    seconds = stage.read(Health.SAFE_STOP).health_s
    assert seconds == {
        Health.STARTING: 2.0,
        Health.WAITING: 0.0,
        Health.NOMINAL: 3.0,
        Health.DEGRADED: 0.0,
        Health.SAFE_STOP: 1.0,
    }


def test_given_nobody_who_reads_when_rows_are_pushed_out_then_they_are_counted_and_memory_is_bounded(stage):
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


# -- counters


def rows(pending, row):
    return np.array(list(pending), row)


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
@pytest.mark.parametrize("stamped", [True, False])
def test_given_stamps_then_what_is_odd_about_them_is_counted_if_the_type_has_one(
    stamps_ns, ages_ms, counts, stamped
):
    counters = StageCounters()
    for stamp_ns, age_ms in zip(stamps_ns, ages_ms, strict=True):
        counters.received(7, stamp_ns, age_ms, stamped=stamped)
    found = (
        counters.zero_stamps,
        counters.future_stamps,
        counters.backward_stamps,
        counters.repeated_stamps,
    )
    assert found == (counts if stamped else (0, 0, 0, 0))
    assert counters.frames == len(stamps_ns)
    receipts = rows(counters.receipts, RECEIPT)
    assert receipts["number"].tolist() == list(range(1, len(stamps_ns) + 1))
    assert set(receipts["received_ns"].tolist()) == {7}


outcomes = st.tuples(st.sampled_from(Outcome), st.sampled_from([None, *Fallback]), st.floats(-5.0, 5.0))


@given(st.lists(outcomes, max_size=60), st.integers(0, 60))
def test_given_any_answers_when_added_then_the_counters_add_up(answered, superseded):
    counters = StageCounters()
    for total_ms, (outcome, fallback, lateness_ms) in enumerate(answered):
        frame = Frame(0, b"", 0, 0.0, 0, 0, Origin(0, 0.0))
        counters.add(Answer(frame, outcome, fallback, "", 0, 0.0, total_ms, 1.0, lateness_ms, 0))
    for outcome in Outcome:
        assert counters.outcomes[outcome] == sum(each is outcome for each, _, _ in answered)
    for fallback in Fallback:
        assert counters.fallbacks[fallback] == sum(each is fallback for _, each, _ in answered)
    assert counters.answered + counters.unanswered == counters.ended == len(answered)
    assert counters.unanswered == counters.fallbacks[Fallback.NONE]
    assert counters.missed_deadline == sum(lateness_ms > 0 for _, _, lateness_ms in answered)
    in_time = counters.outcomes[Outcome.ON_TIME] + counters.outcomes[Outcome.PARTIAL]
    came = len(answered) + superseded
    assert counters.miss_ratio(superseded) == pytest.approx(1 - in_time / came if came else 0.0)
    left = rows(counters.answers, ANSWER)
    assert (
        left["number"].tolist()
        == [number + 1 for number in left["total_ms"]]
        == list(range(1, len(answered) + 1))
    )
    assert left["lateness_ms"].tolist() == [lateness_ms for _, _, lateness_ms in answered]


# -- what figures are made of


@given(
    batches=st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=8),
    span=st.integers(1, 40),
    most=st.integers(1, 12),
)
def test_given_any_batches_when_taken_then_what_is_left_is_the_newest_of_the_span(batches, span, most):
    pending, seen, now, number = deque(), [], 0, 0
    recent = RecentRows(pending, RECEIPT, most)
    for gaps in [*batches, []]:
        times = [now := now + gap for gap in gaps]
        pending.extend((time, -time, 0, number := number + 1) for time in times)
        seen = [time for time in seen[-most:] + times if time >= now - span][-most:]
        assert recent.take(now - span)["received_ns"].tolist() == times
        assert recent.rows["received_ns"].tolist() == seen
        assert recent.rows["age_ms"].tolist() == [-time for time in seen]
    recent.take(now + 1)
    assert (len(recent.rows), recent.unrecorded) == (0, 0)


durations_ms = st.floats(1e-3, 1e6)


@given(st.lists(st.lists(durations_ms, max_size=40), max_size=4))
def test_given_any_durations_when_asked_then_each_percentile_is_within_its_error_and_the_maximum_is_exact(
    batches,
):
    sketch, seen = LatencySketch(), [value for batch in batches for value in batch]
    for batch in batches:
        sketch.add(np.array(batch, dtype=float))
    found = sketch.quantiles()
    assert found.count == len(seen)
    if not seen:
        assert all(math.isnan(value) for _, value in found.items())
        return
    assert found.max_ms == max(seen)
    exact = np.percentile(seen, [50, 95, 99], method="lower")
    assert [found.p50_ms, found.p95_ms, found.p99_ms] == pytest.approx(exact, rel=RELATIVE_ERROR * 1.0001)


@given(st.lists(durations_ms | st.just(math.nan), max_size=300))
def test_given_any_durations_and_unknown_ones_when_asked_then_percentiles_are_numpys_of_the_known(values):
    known, found = [value for value in values if not math.isnan(value)], Quantiles.of(np.array(values))
    assert found.count == len(known)
    exact = np.percentile(known, [50, 95, 99, 100]) if known else [math.nan] * 4
    assert [value for _, value in found.items()] == pytest.approx(exact, rel=1e-12, nan_ok=True)


def test_given_durations_out_of_range_when_added_then_they_count_at_its_ends():
    sketch = LatencySketch()
    sketch.add(np.array([-1.0, 0.0, 1e9]))
    assert sketch.quantiles().count == 3
    assert sketch.quantiles().p50_ms == pytest.approx(1e-3, rel=0.02)
    assert sketch.quantiles().max_ms == 1e9
    assert sketch.counts.nbytes < 9000


@given(st.lists(st.floats(0, 3) | st.sampled_from([*LATENESS_BOUNDS_S.tolist(), math.nan]), max_size=60))
def test_given_any_samples_when_counted_then_each_bucket_holds_those_up_to_its_bound(samples):
    counts = BucketCounts(LATENESS_BOUNDS_S)
    counts.add(np.array(samples[:20], dtype=float))
    counts.add(np.array(samples[20:], dtype=float))
    buckets, total_s = counts.snapshot()
    known = [sample for sample in samples if not math.isnan(sample)]
    assert [count for _, count in buckets] == [
        sum(sample <= float(bound) for sample in known) for bound, _ in buckets
    ]
    assert [bound for bound, _ in buckets][-1] == "+Inf"
    assert total_s == pytest.approx(sum(known))


@given(st.floats(1.0, 60_000.0))
def test_given_any_budget_when_bounds_are_placed_then_they_rise_and_the_budget_is_one_of_them(budget_ms):
    bounds_s = budget_bounds_s(budget_ms)
    assert bounds_s.tolist() == sorted(set(bounds_s.tolist()))
    assert any(bound == pytest.approx(budget_ms / 1000, rel=1e-5) for bound in bounds_s)


def test_given_the_default_budget_when_bounds_are_placed_then_they_read_well():
    assert budget_bounds_s(50.0)[:3].tolist() == [0.005, 0.01, 0.015]
    assert 0.05 in budget_bounds_s(50.0)


START_NS = 1_000 * NS_PER_S


@pytest.fixture
def statistics():
    made = StageStatistics(stage_config("perception", {"sustained_misses": 3}))
    made.health.ready()
    return made


def frame(seq=0):
    return Frame(seq, b"", 5, 1.0, time.monotonic_ns(), 0, Origin(0, math.nan))


def answer(statistics, outcome, fallback, *, stale=False):
    one = frame()
    one.stale = stale
    statistics.received(one, stamped=True)
    return statistics.answered(
        Answer(one, outcome, fallback, "", 0, 0.0, 1.0, 50.0, 0.0, time.monotonic_ns())
    )


def state(statistics):
    return statistics.health.state(time.monotonic_ns())


def test_given_answers_when_noted_then_counters_health_and_anomalies_agree(statistics):
    assert answer(statistics, Outcome.ON_TIME, None) is None
    assert state(statistics) is Health.NOMINAL
    assert answer(statistics, Outcome.LATE, Fallback.HOLD_LAST).level is Level.WARN
    assert state(statistics) is Health.DEGRADED
    answer(statistics, Outcome.LATE, Fallback.HOLD_LAST)
    assert answer(statistics, Outcome.LATE, Fallback.HOLD_LAST).level is Level.ERROR
    assert state(statistics) is Health.SAFE_STOP
    assert (statistics.counters.frames, statistics.counters.answered) == (4, 4)


def test_given_stale_frames_when_noted_then_they_are_answered_count_as_misses_and_have_an_alert(statistics):
    answer(statistics, Outcome.ON_TIME, None)
    alerts = [
        answer(statistics, Outcome.LATE, fallback, stale=True) for fallback in (Fallback.HOLD_LAST,) * 3
    ]
    assert state(statistics) is Health.SAFE_STOP
    assert (statistics.counters.answered, statistics.counters.stale) == (4, 3)
    assert {alert.name for alert in alerts} == {"perception: stale"}
    assert [alert.level for alert in alerts] == [Level.WARN, Level.WARN, Level.ERROR]
    answer(statistics, Outcome.LATE, Fallback.NONE, stale=True)
    assert (statistics.counters.unanswered, statistics.counters.stale) == (1, 4)


def answers_every(ms, comes_every_ms, seconds, statistics, clock):
    """Frames of a model that takes so long, one after the other, the newest each time.

    What was told of them.
    """
    told, superseded, busy_until_ms, waiting = [], 0, 0.0, False
    for number in range(round(seconds * 1000 / comes_every_ms)):
        now_ms = number * comes_every_ms
        clock.reach(START_NS + round(now_ms * 1e6))
        if waiting and busy_until_ms <= now_ms:
            waiting, busy_until_ms = False, busy_until_ms + ms
            take(statistics, clock, ms)
        superseded += waiting
        waiting = busy_until_ms > now_ms
        if not waiting:
            busy_until_ms = now_ms + ms
            take(statistics, clock, ms)
        told.append((now_ms / 1000, come(statistics, clock, superseded)))
    return [(at_s, alert) for at_s, alert in told if alert is not None]


def come(statistics, clock, superseded):
    return statistics.received(
        Frame(0, b"", 5, 1.0, clock(), 0, Origin(0, math.nan)), superseded, stamped=True
    )


def take(statistics, clock, ms):
    one = Frame(0, b"", 5, 1.0, clock(), 0, Origin(0, math.nan))
    statistics.answered(Answer(one, Outcome.ON_TIME, None, "", 0, 5.0, ms + 5.0, 200.0, -1.0, clock()))


@pytest.fixture
def clocked():
    clock = VirtualClock(START_NS)
    made = StageStatistics(stage_config("perception", {}), clock)
    made.health.ready()
    return made, clock


def test_given_a_model_slower_than_its_sensor_when_ten_seconds_have_passed_then_it_is_degraded_and_told(
    clocked,
):
    statistics, clock = clocked
    told = answers_every(53.0, 1000 / 60, 30, statistics, clock)
    assert [round(at_s) for at_s, _ in told] == list(range(10, 30))
    _, alert = told[0]
    assert (alert.level, alert.name) == (Level.WARN, "perception: drops")
    assert " of 600 frames in 10 s had no answer, as a newer one came first: " in alert.message
    assert "one comes every 16.7 ms and takes 53.0; " in alert.message
    assert float(alert.values["value"]) == pytest.approx(68, abs=2)
    assert statistics.health.state(clock()) is Health.DEGRADED


@pytest.mark.parametrize("takes_ms", [10.0, 33.0, 34.0])
def test_given_a_model_that_keeps_up_or_nearly_so_when_frames_come_then_it_stays_nominal(clocked, takes_ms):
    statistics, clock = clocked
    assert not answers_every(takes_ms, 33.4, 60, statistics, clock)
    assert statistics.health.state(clock()) is Health.NOMINAL


def test_given_an_input_that_becomes_slower_when_ten_seconds_have_passed_then_it_is_nominal_again(clocked):
    statistics, clock = clocked
    superseded = int(answers_every(53.0, 1000 / 60, 12, statistics, clock)[-1][1].values["superseded"])
    for _ in range(120):
        clock.advance_ms(100)
        alert = come(statistics, clock, superseded)
        take(statistics, clock, 53.0)
    assert alert is None
    assert statistics.health.state(clock()) is Health.NOMINAL


def test_given_a_pause_of_the_input_when_it_comes_back_then_what_was_superseded_before_says_nothing(
    clocked,
):
    statistics, clock = clocked
    assert answers_every(53.0, 1000 / 60, 12, statistics, clock)
    clock.advance_ms(30_000)
    assert come(statistics, clock, 900) is None
    take(statistics, clock, 53.0)
    assert statistics.health.state(clock()) is Health.NOMINAL


def test_given_frames_in_bunches_when_too_many_are_superseded_then_the_cause_is_not_the_model(clocked):
    statistics, clock = clocked
    told = []
    for number in range(200):
        clock.advance_ms(66.6)
        take(statistics, clock, 10.0)
        told += [come(statistics, clock, number), come(statistics, clock, number + 1)]
    assert any(alert and "takes 10.0, but they come in bunches" in alert.message for alert in told)


@pytest.mark.parametrize(
    ("alone", "then", "if_it_lasts"),
    [(False, Health.NOMINAL, Health.NOMINAL), (True, Health.STARTING, Health.SAFE_STOP)],
)
def test_given_a_death_then_the_stage_starts_again_or_stops_safely_only_where_nobody_else_serves(
    statistics, alone, then, if_it_lasts
):
    answer(statistics, Outcome.ON_TIME, None)
    assert statistics.worker_died("why", 7, 1, lasting=False, alone=alone).name == "perception: worker died"
    assert state(statistics) is then
    statistics.worker_died("why", 8, 2, lasting=True, alone=alone)
    assert state(statistics) is if_it_lasts


def test_given_changed_limits_when_reconfigured_then_they_hold_at_once(statistics):
    answer(statistics, Outcome.LATE, Fallback.HOLD_LAST)
    statistics.reconfigure(stage_config("perception", {"sustained_misses": 2}))
    answer(statistics, Outcome.LATE, Fallback.HOLD_LAST)
    assert state(statistics) is Health.SAFE_STOP
