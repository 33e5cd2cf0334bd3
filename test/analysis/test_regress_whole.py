"""What is compared of the whole run: outputs, memory, start-up and compile time."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from torchperf_ros.analysis.regress_compare import compare
from torchperf_ros.analysis.regress_run import RunFrames, of_run, stage_frames
from torchperf_ros.analysis.regress_stage import Resampling
from torchperf_ros.analysis.regress_verdict import Verdict
from torchperf_ros.core.outcome import Outcome

sys.path.insert(0, str(Path(__file__).parent))
import regress_runs as made

QUICK = Resampling(resamples=1000)


def view(total_ms, **changes):
    return of_run(made.run(total_ms, **changes), "run")


def verdicts(base, new):
    return {finding.estimate.metric.key: finding for finding in compare(base, new, resampling=QUICK).findings}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Verdict.WORSE),
        ({"pace": "real"}, Verdict.INFORMATIVE),
        ({"model": {"perception": "dd"}}, Verdict.INFORMATIVE),
        ({"log": {"sha256": "other"}}, Verdict.INFORMATIVE),
        ({"machine": {**made.summary()["machine"], "torch": "2.14.0"}}, Verdict.INFORMATIVE),
        ({"seed": 1}, Verdict.INFORMATIVE),
        ({"commit": "ffff"}, Verdict.WORSE),
    ],
)
def test_given_another_output_when_compared_then_it_is_worse_only_where_nothing_explains_it(changes, expected):
    values = made.latencies(100, 1)
    new = made.run(values, **changes)
    new.frames["perception"]["output_hash"][7] += 1
    found = verdicts(view(values), of_run(new, "new"))["outputs"]

    assert found.verdict is expected
    assert found.estimate.new == pytest.approx(1.0)
    assert "99 of 100 outputs are the same, matched by stamp" in found.notes[0]


@pytest.mark.parametrize(("stamped", "word"), [(True, "stamp"), (False, "number")])
def test_given_frames_of_one_run_only_when_matched_then_they_are_counted(stamped, word):
    rows, others = made.rows(made.latencies(100, 1)), made.rows(made.latencies(100, 2))
    for each in (rows, others):
        each["stamp_ns"] *= stamped
    runs = [RunFrames("run", {"s": stage_frames("s", each)}) for each in (rows[:90], others[5:])]
    agreement = compare(*runs, resampling=QUICK).agreements["s"]

    assert (agreement.matched, agreement.equal, agreement.base_only, agreement.new_only) == (85, 85, 5, 10)
    assert f"matched by {word}" in agreement.in_words


def test_given_other_tiers_and_fallbacks_when_matched_then_their_outputs_are_not_expected_to_be_the_same():
    rows, others = made.rows(made.latencies(10, 1)), made.rows(made.latencies(10, 1))
    others["output_hash"] += 1
    others["tier"][:4], others["outcome"][4:9] = 1, Outcome.LATE
    runs = [RunFrames("run", {"s": stage_frames("s", each)}) for each in (rows, others)]

    assert compare(*runs, resampling=QUICK).agreements["s"].matched == 1


@pytest.mark.parametrize(("mib_per_h", "expected"), [(0.0, Verdict.EQUIVALENT), (600.0, Verdict.WORSE)])
def test_given_memory_over_time_when_compared_then_a_leak_is_worse(mib_per_h, expected):
    seconds = np.arange(900.0)
    mib = 800 + np.random.default_rng(0).normal(0, 0.5, 900)
    values = made.latencies(50, 1)
    base = replace(view(values), memory_s=seconds, memory_mib=mib)
    new = replace(view(values), memory_s=seconds, memory_mib=mib[::-1] + mib_per_h * seconds / 3600)
    found = verdicts(base, new)

    assert found["memory_slope"].verdict is expected
    assert found["memory_slope"].estimate.new == pytest.approx(mib_per_h, abs=5)
    assert found["memory_peak"].verdict is (Verdict.WORSE if mib_per_h > 200 else Verdict.EQUIVALENT)
    short = verdicts(base, replace(new, memory_s=seconds[:100], memory_mib=mib[:100]))["memory_slope"]
    assert (short.verdict, short.needed, short.estimate.kind) == (Verdict.NOT_ENOUGH, 240, "s")
    sparse = verdicts(base, replace(new, memory_s=30 * seconds[:15], memory_mib=mib[:15]))["memory_slope"]
    assert sparse.needed == 620  # 13 samples in 360 s; 20 are wanted, and a minute before them
    doubled = replace(new, memory_s=seconds // 30 * 30, memory_mib=np.full(900, 800.0))  # samples of the same time
    assert verdicts(base, doubled)["memory_slope"].estimate.new == 0.0


def test_given_metrics_that_one_run_tells_when_compared_then_it_is_said_and_what_none_tells_is_left_out():
    values = made.latencies(50, 1)
    found = verdicts(view(values), view(values, compile_s=30.0, start_up_s=4.5))

    assert found["compile"].verdict is Verdict.NOT_ENOUGH
    assert found["compile"].notes == ("the base run does not tell",)
    assert found["start_up"].verdict is Verdict.WORSE
    assert not {"memory_peak", "memory_slope"} & set(found)
