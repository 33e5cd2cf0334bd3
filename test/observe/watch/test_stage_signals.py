"""A stage's signals and its input's, from the frames that a recorder gets, on a virtual clock."""

import math
import random
from dataclasses import dataclass

import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.watch.series_detector import Signal, SignalRule, number
from torchperf_ros.observe.watch.stage_signals import CounterSignals, StageSignals
from torchperf_ros.stage.frame import StepTimes

from ..telemetry.frame_records import frame_record


@dataclass
class Moment:
    """How the stage and its camera are in a second."""

    rate_hz: float = 10.0
    slower: float = 1.0
    jitter_ms: float = 0.0
    missed: float = 0.0
    dropped: float = 0.0
    late_ms: float = 1.0
    age_ms: float = 4.0
    tier: int = 0
    fallback: Fallback = Fallback.BACKUP


def drive(seconds, at, seed=0):
    """What was found, by name: (second, finding)."""
    rng = random.Random(seed)
    stage = StageSignals("camera", ("full", "medium", "fast"), 50.0, "/image")
    found, seq = {}, 0
    start_ns = 1_000 * NS_PER_S
    due_ns = float(start_ns)
    for second in range(seconds):
        now = at(second)
        end_ns = start_ns + (second + 1) * NS_PER_S
        if not now.rate_hz:
            due_ns = float(end_ns)
        while due_ns < end_ns:
            received_ns = int(due_ns + abs(rng.gauss(0, now.late_ms)) * NS_PER_MS)
            if rng.random() >= now.dropped:
                stage.answered(answered(seq, received_ns, now, rng))
            else:
                stage.superseded += 1
            seq += 1
            due_ns += NS_PER_S / now.rate_hz
        for finding in stage.second(end_ns, "71")[1]:
            found.setdefault(finding.name, []).append((second, finding))
    return found


def answered(seq, received_ns, now, rng):
    inference_ms = 14.0 * now.slower * rng.lognormvariate(0, 0.05) + now.jitter_ms * rng.uniform(-0.5, 0.5)
    missed = rng.random() < now.missed
    return frame_record(
        seq=seq,
        received_ns=received_ns,
        outcome=Outcome.LATE if missed else Outcome.ON_TIME,
        fallback=now.fallback if missed else None,
        tier=now.tier,
        age_ms=now.age_ms + rng.random(),
        steps=StepTimes(0.5, 2.0, inference_ms, 0.5),
        total_ms=50.0 if missed else inference_ms + 3.1,
    ).row


def between(begin, end, **fault):
    """A usual drive, and a fault from one second to another."""
    return lambda second: Moment(**fault) if begin <= second < end else Moment()


def test_given_half_an_hour_of_usual_frames_when_watched_then_nothing_is_told():
    assert drive(1800, lambda _: Moment(missed=0.002)) == {}


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ({"slower": 1.5}, "camera: latency", "; most of it in inference"),
        ({"jitter_ms": 8.0}, "camera: latency", "latency jitter on tier full"),
        ({"rate_hz": 3.0}, "camera: input rate", "Hz, usually 10.0 Hz"),
        ({"rate_hz": 20.0}, "camera: input rate", "Hz, usually 10.0 Hz"),
        ({"age_ms": 40.0}, "camera: age", "age at receipt"),
        ({"late_ms": 40.0}, "camera: jitter", "jitter of the input"),
        ({"late_ms": 8.0}, "camera: jitter", "jitter of the input"),
        ({"tier": 2}, "camera: tier", "tier fast, usually full"),
        ({"missed": 0.5}, "camera: misses", "other processes took 71 % of the CPU"),
    ],
)
def test_given_a_fault_when_it_lasts_then_it_alone_is_told_within_seconds_and_until_it_is_over(
    fault, name, words
):
    found = drive(230, between(150, 180, **fault))
    told = found.pop(name)
    assert 150 <= told[0][0] <= 162
    assert 176 <= told[-1][0] <= 195
    assert words in told[0][1].message
    assert {told[0][1].level, *(finding.level for _, finding in told)} == {Level.WARN}
    # what goes with it: a fault may show in more than one signal, but never in those of something else
    related = {"camera: misses": {"camera: latency"}}
    assert set(found) <= related.get(name, set())


def test_given_misses_that_nothing_fresh_answers_when_most_frames_have_them_then_it_is_an_error():
    found = drive(40, between(20, 40, missed=0.9, fallback=Fallback.STOP))
    assert found["camera: misses"][-1][1].level is Level.ERROR
    assert "late" in found["camera: misses"][-1][1].message


def test_given_a_camera_that_stops_when_silent_for_seconds_then_it_is_an_error_until_it_is_back():
    found = drive(120, between(60, 90, rate_hz=0.0))
    told = found.pop("camera: input stopped")
    assert 62 <= told[0][0] <= 64
    assert told[-1][0] == 89
    assert told[0][1].level is Level.ERROR
    assert "nothing on /image for 3 s, usually 10.0 Hz" in told[0][1].message
    assert found == {}


def test_given_a_camera_that_stays_away_when_minutes_pass_then_it_is_not_over():
    found = drive(500, between(60, 500, rate_hz=0.0))
    told = [second for second, _ in found.pop("camera: input stopped")]
    assert told == list(range(told[0], 500))
    assert found == {}


def test_given_a_lower_tier_when_it_is_slower_than_its_own_usual_then_only_that_counts():
    """A tier's latency is compared with that tier's: a climb from fast to full is no fault."""

    def at(second):
        return Moment(tier=2, slower=0.3) if second < 200 else Moment(tier=0)

    assert drive(400, at) == {}


def counters(**values):
    return {
        "restarts": "0",
        "tier_full_recompiles": "0",
        **{key: str(value) for key, value in values.items()},
    }


def test_given_counters_when_they_rise_then_each_is_told_by_its_own_rule():
    signals = CounterSignals("camera", ["full"])
    signals.status(0.0, counters(restarts=7))
    assert signals.second(round(0.0 * NS_PER_S))[1] == []  # what was before the watch began is not new
    signals.status(1.0, counters(restarts=9))
    assert signals.second(round(1.0 * NS_PER_S))[1] == []
    signals.status(5.0, counters(restarts=10, tier_full_recompiles=2))
    found = {finding.name: finding.message for finding in signals.second(round(5.0 * NS_PER_S))[1]}
    assert found["camera: restarts"].startswith("3 workers were restarted")
    assert found["camera: recompilation"].startswith("2 frames would have been compiled for again")
    assert {finding.name for finding in signals.second(round(20.0 * NS_PER_S))[1]} == {"camera: restarts"}
    assert signals.second(round(400.0 * NS_PER_S))[1] == []
    signals.status(401.0, {"progress": "no counters before a worker is ready"})
    assert signals.second(round(401.0 * NS_PER_S))[1] == []


# -- one signal


LATENCY = SignalRule("latency p50", "latency", "ms", "up", 2.5, 0.15)
RATE = SignalRule("input rate", "input rate", "Hz", "both", 0.5, 0.2)


def latency(seconds, slow=lambda second: False):
    """Around 18 ms with noise, and now and then a second that is slower; 9 ms more where it is `slow`."""
    rng = random.Random(0)
    return [
        18.0 + rng.gauss(0, 0.4) + 6.0 * (rng.random() < 0.004) + 9.0 * slow(at) for at in range(seconds)
    ]


def run(rule, values):
    """The alerts by second."""
    signal, why = Signal(rule), "; most of it in inference"
    return {
        at: signal.alert("camera", why)
        for at, value in enumerate(values)
        if signal.update(1000.0 + at, value)
    }


def steady(usual, then, seconds, begin=300):
    """Next to no noise around `usual`, and `then` from a second on."""
    return [(then if second >= begin else usual) + 0.01 * (second % 3) for second in range(seconds)]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(latency(3 * 3600), id="hours of noise"),
        pytest.param(latency(400, lambda second: second in {300, 301}), id="two slow seconds"),
        pytest.param(steady(18.0, 19.5, 400), id="below the floor"),
        pytest.param(steady(30.0, 10.0, 400), id="the other direction"),
        pytest.param(steady(18.0, 27.0, 58, begin=50), id="a start unlike what follows"),
        pytest.param(
            [math.nan if at % 3 == 0 else value for at, value in enumerate(latency(600))], id="gaps"
        ),
    ],
)
def test_given_seconds_that_are_no_departure_of_the_rule_when_watched_then_nothing_is_told(values):
    assert run(LATENCY, values) == {}


def test_given_a_rule_that_counts_it_when_watched_then_the_same_departure_is_told():
    assert run(SignalRule("latency p50", "latency", "ms", "up", 0.5), steady(18.0, 19.5, 400))
    assert min(run(RATE, steady(30.0, 10.0, 400))) <= 304
    assert run(LATENCY, [math.nan, *latency(600), math.nan] + [27.0] * 20)


@pytest.mark.parametrize("learnt_s", [90, 300, 1000])
def test_given_a_latency_half_again_as_long_when_it_lasts_then_it_is_told_within_seconds_and_until_it_is_over(
    learnt_s,
):
    told = run(LATENCY, latency(learnt_s + 100, lambda second: learnt_s <= second < learnt_s + 40))
    assert learnt_s + 2 <= min(told) <= learnt_s + 6
    assert learnt_s + 39 <= max(told) <= learnt_s + 44
    assert len(told) == max(told) - min(told) + 1
    assert {round(float(alert.values["baseline"])) for alert in told.values()} == {18}


def test_given_the_same_fault_again_when_it_lasts_then_it_is_told_again_until_it_is_how_things_are():
    told = run(LATENCY, latency(2000, lambda second: second >= 300 and second % 100 < 20))
    assert {second // 100 for second in told} >= {3, 4, 5, 6}
    assert max(told) < 1500


def test_given_a_new_level_when_it_stays_then_it_is_the_usual_after_five_minutes():
    told = run(LATENCY, latency(1500, lambda second: second >= 300))
    assert 595 <= max(told) <= 605


def test_given_a_departure_when_said_then_the_sentence_has_value_baseline_and_time():
    told = run(LATENCY, steady(18.0, 18.0, 200) + [27.0] * 13)
    finding = told[max(told)]
    assert finding.name == "camera: latency"
    assert finding.level is Level.WARN
    assert finding.message == "latency p50 27.0 ms, usually 18.0 ms, since 12 s; most of it in inference"
    assert {
        "value": "27.0",
        "baseline": "18.0",
        "unit": "ms",
        "since": "12",
    }.items() <= finding.values.items()
    assert 0.3 <= float(finding.values["score"]) <= 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.12"), (18.44, "18.4"), (1234.5, "1234"), (-12.0, "-12.0"), (math.nan, "unknown")],
)
def test_given_a_number_when_said_then_it_has_the_digits_that_matter(value, text):
    assert number(value) == text
