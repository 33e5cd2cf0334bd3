import json
import math
import re
from dataclasses import asdict

import pytest

from torchperf_ros.settings.build_options import ENGINES, BuildOptions
from torchperf_ros.tools.tune.run import gain_text
from torchperf_ros.tools.tune.trial import (
    Accuracy,
    Group,
    Limits,
    Ranking,
    TierChoice,
    TrialOutcome,
    TuneCandidate,
    TuneTrial,
)
from torchperf_ros.workers.control import from_json

from .conftest import figures


def trial(name, p50_ms, p99_ms=None, *, eager_ms=10.0, outcome=TrialOutcome.MEASURED, reason="", **changes):
    times = {
        "p99_ms": p50_ms if p99_ms is None else p99_ms,
        "eager_p50_ms": eager_ms,
        "eager_p99_ms": 1.1 * eager_ms,
    }
    candidate = TuneCandidate(
        BuildOptions(**({"precision": name} if name in {"bf16", "fp16"} else {"engine": name}))
    )
    return TuneTrial("full", candidate, outcome, reason, figures(p50_ms, **times | changes))


def names(ranking):
    return [standing.trial.candidate.options.label for standing in ranking.standings]


def test_given_trials_when_ranked_then_the_smallest_p99_within_the_budget_is_first_and_the_refused_are_last():
    crashed = TuneTrial(
        "full", TuneCandidate(BuildOptions(precision="fp16")), TrialOutcome.CRASHED, "signal SIGSEGV"
    )
    ranking = Ranking(
        [crashed, trial("eager", 10.0), trial("aoti", 3.0), trial("bf16", 40.0), trial("compile", 5.0)],
        Limits(budget_ms=20.0),
    )
    assert names(ranking) == ["aoti", "compile", "eager", "eager bf16", "eager fp16"]
    assert [s.group for s in ranking.standings] == [Group.FITS] * 3 + [Group.OVER_BUDGET, Group.REFUSED]
    assert "20 ms" in ranking.standings[3].why
    assert ranking.standings[4].why == "crashed: signal SIGSEGV"


def test_given_a_machine_that_slowed_down_when_ranked_then_times_count_relative_to_eager_beside_them():
    quiet, loaded = trial("compile", 6.0, eager_ms=10.0), trial("aoti", 8.0, eager_ms=20.0)
    ranking = Ranking([trial("eager", 10.0), quiet, loaded], Limits(100.0))
    assert ranking.eager_ms == 10.0
    assert names(ranking)[0] == "aoti"
    assert ranking.standings[0].p99_ms == pytest.approx(4.0)


def test_given_a_tie_by_p99_when_ranked_then_the_median_decides_and_then_who_changes_less():
    limits = Limits(100.0)
    by_median = Ranking([trial("eager", 10.0, 10.0), trial("aoti", 5.0, 10.5)], limits)
    assert by_median.noise == pytest.approx(0.1)
    assert names(by_median)[0] == "aoti"
    assert names(Ranking([trial("aoti", 9.7, 9.9), trial("eager", 10.0, 10.0)], limits))[0] == "eager"


def test_given_the_same_reference_when_it_scatters_then_the_noise_says_by_how_much():
    assert Ranking(
        [trial(name, 5.0) for name in ("eager", "aoti", "compile", "bf16", "fp16")], Limits(100.0)
    ).noise == pytest.approx(0.02)
    assert Ranking(
        [trial("aoti", 5.0, eager_p99_ms=ms) for ms in (10.0, 12.0, 14.0, 16.0, 18.0)], Limits(100.0)
    ).noise == pytest.approx(6.0 / 14.0)
    # Of few, eager met the same stalls as the faster one.
    assert (
        names(
            Ranking(
                [trial("eager", 10.0, 11.0), trial("aoti", 6.0, 80.0, eager_p99_ms=100.0)], Limits(100.0)
            )
        )[0]
        == "aoti"
    )


def test_given_stalls_as_long_as_a_call_or_longer_when_ranked_then_the_median_decides():
    stalls = zip(ENGINES, (0.3, 6.0, 6.3, 7.0, 12.8), strict=False)
    others = [trial(name, 0.3, ms, eager_ms=0.15, eager_p99_ms=ms) for name, ms in stalls]
    hit = trial("onnxruntime", 0.11, 5.2, eager_ms=0.15, eager_p99_ms=6.1)
    lucky = trial("openvino", 0.137, 0.28, eager_ms=0.15, eager_p99_ms=6.3)
    assert names(Ranking([*others, hit, lucky], Limits(100.0)))[0] == "onnxruntime"


def test_given_noise_that_others_have_shown_when_few_are_ranked_then_it_counts_for_them_too():
    trials = [trial("eager", 10.0, 10.0), trial("aoti", 5.0, 12.0)]
    assert names(Ranking(trials, Limits(100.0)))[0] == "eager"
    assert names(Ranking(trials, Limits(100.0), least_noise=0.3))[0] == "aoti"


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [
        (Accuracy("map", 0.871, 0.902, 9), "accuracy: map 0.871; eager fp32 has 0.902; at most 0.005 less"),
        (
            Accuracy("fde", 0.902, 0.871, 9, higher_is_better=False),
            "accuracy: fde 0.902; .* 0.871; at most 0.005 more",
        ),
        (Accuracy("map", math.nan, 0.902, 9), "accuracy: map nan"),
    ],
)
def test_given_less_accuracy_than_eagers_when_ranked_then_it_is_refused_unless_that_is_allowed(
    accuracy, words
):
    ranking = Ranking([trial("eager", 10.0), trial("bf16", 5.0, accuracy=accuracy)], Limits(100.0))
    assert names(ranking) == ["eager", "eager bf16"]
    assert re.match(words, ranking.standings[1].why)
    allowed = Ranking([trial("bf16", 5.0, accuracy=accuracy)], Limits(100.0, max_loss=0.04))
    assert (allowed.best is None) == math.isnan(accuracy.value)


@pytest.mark.parametrize(
    "accuracy",
    [
        Accuracy("map", 0.898, 0.902, 9),
        Accuracy("fde", 0.5, 0.9, 9, higher_is_better=False),
        Accuracy("map", math.nan, math.nan, 9),
    ],
)
def test_given_about_eagers_accuracy_or_nothing_to_judge_by_when_ranked_then_it_is_not_refused(accuracy):
    assert Ranking([trial("bf16", 5.0, accuracy=accuracy)], Limits(100.0)).best is not None


def choice(budget_ms=20.0, **tiers):
    """Of tiers, each with the time and the figure of its best way, beside eager with a little more accuracy."""
    rankings = {}
    for tier, (ms, value) in tiers.items():
        eager, own = (
            Accuracy("map", value + 0.001, value + 0.001, 9),
            Accuracy("map", value, value + 0.001, 9),
        )
        rankings[tier] = Ranking(
            [trial("eager", 3 * ms, accuracy=eager), trial("aoti", ms, accuracy=own)], Limits(budget_ms)
        )
    return TierChoice(rankings, Limits(budget_ms))


def test_given_tiers_when_compared_then_the_one_that_another_beats_is_named_and_the_most_accurate_in_budget_is_first():
    found = choice(full=(30.0, 0.9), medium=(12.0, 0.8), small=(13.0, 0.75), fast=(3.0, 0.7))
    assert (list(found.kept), found.first) == (["full", "medium", "fast"], "medium")
    assert found.left_out == {
        "small": (
            "neither faster (p99 13.00 ms) nor more accurate (map 0.750) than medium (12.00 ms, map 0.800):"
            " leave it out"
        )
    }
    named, left = found.words()
    assert named.startswith("tiers worth keeping on this machine: full (p99 30.00 ms, map 0.900), medium")
    assert named.endswith("begin with medium, the most accurate that fits the budget of 20 ms")
    assert left == f"small: {found.left_out['small']}"


def test_given_two_tiers_that_are_alike_when_compared_then_the_first_is_kept_and_with_no_budget_for_any_that_is_said():
    found = choice(1.0, full=(10.0, 0.9), fast=(9.8, 0.899))
    assert (list(found.kept), list(found.left_out), found.first) == (["full"], ["fast"], "")
    assert found.words()[0].endswith("none fits the budget of 1 ms")
    untried = TierChoice(
        {
            "full": Ranking([trial("aoti", 4.0, accuracy=Accuracy("map", 0.9, 0.9, 9))], Limits(20.0)),
            "fast": Ranking([], Limits(20.0)),
        },
        Limits(20.0),
    )
    assert untried.words()[1:] == ["fast: nothing that may be used was judged"]
    assert TierChoice({"full": Ranking([trial("aoti", 4.0)], Limits(20.0))}, Limits(20.0)).words() == []


def test_given_only_what_is_over_the_budget_when_ranked_then_the_nearest_is_the_best_and_of_nothing_none_is():
    ranking = Ranking([trial("eager", 10.0), trial("aoti", 5.0)], Limits(budget_ms=1.0))
    assert (ranking.best.trial.candidate.options.engine, ranking.best.group) == ("aoti", Group.OVER_BUDGET)
    assert Ranking([], Limits(1.0)).best is None


@pytest.mark.parametrize(
    ("p50_ms", "compile_s", "frames"),
    [(5.0, 20.0, 4000.0), (10.0, 20.0, math.inf), (12.0, 1.0, math.inf), (5.0, 0.0, 0.0)],
)
def test_given_compile_seconds_then_break_even_is_those_over_the_seconds_saved_per_frame(
    p50_ms, compile_s, frames
):
    assert trial("aoti", p50_ms, compile_s=compile_s).figures.break_even_frames == pytest.approx(frames)


@pytest.mark.parametrize(
    ("low", "high", "p50_ms", "text"),
    [
        (0.53, 0.55, 5.4, "+46 % (45..47)"),
        (0.97, 1.3, 9.9, "~"),
        (1.5, 1.7, 16.0, "-60 % (-70..-50)"),
        (3.0, 3.4, 32.0, "takes 3.2x"),
    ],
)
def test_given_a_share_of_eager_when_judged_then_it_is_a_gain_only_if_every_part_says_so(
    low, high, p50_ms, text
):
    assert gain_text(trial("bf16", p50_ms, least_share=low, most_share=high).figures) == text


def test_given_a_trial_when_written_and_read_then_it_is_the_same():
    judged = trial("aoti", 5.0, accuracy=Accuracy("map", 0.8, 0.9, 9), score=1.0)
    for one in (
        trial("aoti", 5.0),
        judged,
        TuneTrial("fast", TuneCandidate(shapes="bucket", bucket_width=8), TrialOutcome.CRASHED, "x\ny"),
    ):
        assert from_json(TuneTrial, json.loads(json.dumps(asdict(one)))) == one


def test_given_a_candidate_when_named_then_only_what_is_not_the_default_is_said():
    assert TuneCandidate().label == "eager, 1 thread"
    named = TuneCandidate(
        BuildOptions("compile", precision="bf16"), threads=4, shapes="bucket", bucket_width=16
    )
    assert named.label == "compile bf16 bucket 16, 4 threads"


def test_given_a_precision_that_the_task_did_not_judge_when_ranked_then_it_is_not_the_best():
    eager = trial("eager", 10.0, accuracy=Accuracy("map", 0.9, 0.9, 9))
    assert names(Ranking([eager, trial("bf16", 4.0)], Limits(20.0))) == ["eager", "eager bf16"]
    assert names(Ranking([trial("eager", 10.0), trial("bf16", 4.0)], Limits(20.0)))[0] == "eager bf16"
    assert names(Ranking([eager, trial("bf16", 4.0), trial("aoti", 8.0)], Limits(20.0)))[0] == "aoti"
