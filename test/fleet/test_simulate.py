"""A simulated fleet: bad candidates are stopped where few vehicles have them, and good ones arrive."""

from dataclasses import replace

import numpy as np
import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.plan import RolloutStep, TargetingError
from torchperf_ros.fleet.simulate import (
    SimulatedCandidate,
    all_at_once,
    built_in_minutes,
    outcome_rows,
    recorded_minutes,
    simulate,
)
from torchperf_ros.observe.runs.run_log import run_of, write_run
from torchperf_ros.stage.frame_table import FRAME

from .conftest import plan_with

VEHICLES, FEWER = 4000, 400


@pytest.fixture(scope="module")
def windows():
    return built_in_minutes(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("worse", "latency is worse"),
        ("worse-tail", "p99 is worse"),
        ("leaking", "memory_mib_per_h"),
        ("crashing", "worker_deaths"),
        ("worse-on-one-gpu", "is worse on rtx4000"),
    ],
)
def test_given_a_bad_candidate_when_played_then_it_is_stopped_early_and_all_at_once_reaches_all(
    windows, kind, why
):
    steps = simulate(plan_with(), VEHICLES, SimulatedCandidate(kind), windows)
    once = simulate(
        all_at_once(plan_with()), FEWER, SimulatedCandidate(kind), windows
    )  # of every size all vehicles have it
    assert steps.stopped
    assert once.stopped
    assert why in steps.why
    assert steps.reached < 6
    assert once.reached > 90
    assert steps.exposure_h / VEHICLES < 0.2 * once.exposure_h / FEWER


@pytest.mark.parametrize("kind", ["same", "better"])
def test_given_a_good_candidate_when_played_then_it_arrives_step_by_step(windows, kind):
    outcome = simulate(plan_with(), 1500, SimulatedCandidate(kind), windows)
    assert not outcome.stopped
    assert outcome.step == 5
    assert outcome.served > 99
    reached = [share for _, share, _ in outcome.line]
    assert reached == sorted(reached)
    for step, share in enumerate((1, 1, 5, 20, 50)):
        assert max(one for _, one, at in outcome.line if at == step) == pytest.approx(share, abs=2.0)


def test_given_a_crash_in_ten_thousand_frames_when_played_on_many_fleets_then_few_vehicles_ever_have_it(
    windows,
):
    reached = [
        simulate(plan_with(), 10_000, SimulatedCandidate("crashing"), windows, seed).reached
        for seed in range(4)
    ]
    assert max(reached) <= 1.5


def test_given_the_same_seed_when_played_twice_then_it_is_the_same_and_rules_are_followed(windows):
    rule = {"==": [{"var": "gpu"}, "orin"]}
    plan = replace(plan_with(targeting=rule), steps=(RolloutStep(100),))
    one, two = (simulate(plan, 300, SimulatedCandidate("same"), windows, 3) for _ in range(2))
    assert one == two
    assert one.reached < 80
    assert list(outcome_rows({"x": one}))[0] == ("", "x")
    with pytest.raises(TargetingError, match="region"):
        simulate(
            replace(plan, targeting={"==": [{"var": "region"}, "eu"]}), 300, SimulatedCandidate(), windows
        )


def test_given_runs_when_minutes_are_drawn_then_they_are_of_the_stage_and_short_ones_are_refused(tmp_path):
    rows = np.zeros(2000, dtype=FRAME)
    rows["total_ms"], rows["budget_ms"] = np.arange(2000), 33.0
    for name, count in (("long", 2000), ("short", 100)):
        summary = {"stages": [{"name": "perception", "tiers": ["full"]}]}
        write_run(run_of(summary, {"perception": rows[:count]}), tmp_path / f"{name}.json")
    found, budget_ms = recorded_minutes([tmp_path / "long.json"], "perception", np.random.default_rng(1))
    assert found.shape[1] == 1800
    assert (np.diff(found) == 1).all()
    assert budget_ms == 33.0
    for path, stage, match in (
        ("short", "perception", "has 100 frames"),
        ("long", "planning", "has no stage 'planning'"),
    ):
        with pytest.raises(ConfigError, match=match):
            recorded_minutes([tmp_path / f"{path}.json"], stage, np.random.default_rng(1))
