"""The loop with every kind of arm, its determinism, and the checks of the harness itself."""

import json
import runpy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.models.closed_loop import FRAME, path_bytes, plan_along
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayError, ReplayOptions
from torchperf_ros.stage.crew import Crew
from torchperf_ros.tools.main import app
from torchperf_ros.world.drive_command import run_drive, write_drive
from torchperf_ros.world.latencies import RESTART_MS, DrawnRuns
from torchperf_ros.world.loop import PERIOD_NS, Drive, drive, end_workers
from torchperf_ros.world.scenarios import draw_scenario
from torchperf_ros.world.vehicles import Body
from torchperf_ros.world.world import World, score_of, start_ns


@pytest.fixture(scope="module")
def workers():
    kept = {}
    yield kept
    end_workers(kept)


def driven(arm, name="cut_in", seed=1, **options):
    return drive(Drive(draw_scenario(name, seed), arm, **options))


def short(name="ccrb", seed=1, seconds=4.0):
    scenario = draw_scenario(name, seed)
    return type(scenario)(**{**vars(scenario), "duration_s": seconds})


def test_given_the_stages_without_faults_when_they_drive_then_every_plan_is_on_time_and_nothing_is_hit(
    workers,
):
    found = drive(Drive(short("cut_in", 1, 6.0), "no_guard"), workers=workers)
    assert not found.score.collision
    assert found.counts["on_time"] == 120
    assert found.counts["refused by the vehicle"] == 0


def test_given_an_error_in_a_stages_own_code_when_driven_then_the_drive_ends_with_it(workers, monkeypatch):
    """It says nothing of the model, so that no figure of such a drive is worth anything."""

    def breaks(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr(Crew, "idle", breaks)
    with pytest.raises(
        ReplayError, match=r"own code, not in the model(?s:.)*AttributeError: no such thing"
    ):
        drive(Drive(short("cut_in", 1, 1.0), "no_guard"), workers=workers)


def test_given_a_seed_when_driven_twice_by_kept_workers_then_log_and_figures_are_the_same_bytes(
    workers, tmp_path
):
    rows, logs = [], []
    for name in ("a", "b"):
        one = Drive(short("pedestrian", 3, 4.0), "no_guard", 1, "all", tmp_path / f"{name}.mcap")
        found = drive(one, workers=workers)
        rows.append((found.row(), found.injected))
        logs.append(one.output.read_bytes())
    assert rows[0] == rows[1]
    assert logs[0] == logs[1]
    assert {kind for _, kind in found.injected} & {"sigkill", "hang", "poison_hang", "poison_sigkill"}
    assert found.counts.get("hold_last", 0) + found.counts.get("backup", 0) > 0


def test_given_four_times_the_work_when_driven_then_lower_tiers_answer_and_the_deadlines_hold(workers):
    found = drive(Drive(short(seconds=2.0), "no_guard", 4), workers=workers)
    assert found.counts["on_time"] >= 38


def test_given_a_process_that_dies_before_a_child_runs_out_when_driven_then_only_the_naive_node_collides(
    workers, tmp_path, monkeypatch
):
    """What is written of its drive has a test that drives these stages through the same, with a guard."""
    scenario, asked = draw_scenario("pedestrian", 2), []
    write_drive(Drive(scenario, "naive", 1, "bench"), tmp_path)
    naive = json.loads((tmp_path / "drive.json").read_text())
    assert naive["collision"]
    assert naive["impact_ms"] > 5.0
    assert naive["counts"]["restarts"] > 0
    zero, own = (drive(Drive(scenario, arm, 1, "bench"), workers=workers) for arm in ("zero", "no_guard"))
    assert not zero.score.collision
    assert not own.score.collision
    monkeypatch.setattr("torchperf_ros.world.loop.drive", lambda one: asked.append(one) or own)
    test = runpy.run_path(str(tmp_path / "test_pedestrian_2_naive.py"))
    assert "hit a pedestrian at" in test["__doc__"]
    test["test_the_vehicle_hits_nothing"]()
    assert [(one.scenario.drawn, one.arm, one.load, one.faults) for one in asked] == [
        (scenario.drawn, "full", 1, "bench")
    ]
    outputs = []

    class Golden:
        def check(self, output, _stage):
            outputs.append(output.read_bytes())

    def first_second(params, step_times, **options):
        output = tmp_path / f"{len(outputs)}.mcap"
        beside = {"params": tmp_path / params, "step_times": str(tmp_path / step_times)}
        replay(tmp_path / "drive.mcap", ReplayOptions(**beside, **options, output=output, duration_s=1.0))
        return output

    for _ in range(2):  # however fast the machine is
        test["test_plans_are_as_they_were"](first_second, Golden())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("fault", "arms"),
    [
        ("blind", ("no_guard", "no_lane")),
        ("unseen", ("no_lane", "radar")),  # it brakes for the radar's echo
    ],
)
def test_given_a_stage_that_does_not_see_the_car_ahead_when_it_brakes_then_the_guard_brakes_too(
    workers, fault, arms
):
    drives = [Drive(short("ccrb", 7, 7.1), arm, 1, fault) for arm in arms]
    without, found = (drive(one, workers=workers) for one in drives)
    assert without.score.collision
    assert not found.score.collision
    assert found.counts["guard brake"] > 0
    assert {kind for _, kind in found.injected} == {fault}


def test_given_a_wall_that_only_the_scan_shows_then_the_lane_stops_the_vehicle_before_it():
    """By the scan's own bytes, and for good.

    From then on the vehicle follows the lane's path, and no plan.
    """
    wall = Body(
        "wall", 90.0, 0.0, length=0.5, width=3.0
    )  # nobody's object: planner and guard do not know of it
    one = Drive(replace(short("ccrb", 7, 9.0), bodies=[wall]), "watched")
    found = drive(one)
    assert not found.score.collision
    assert "scan shows" in found.latch
    assert found.score.end_speed == 0.0
    assert found.counts["withheld"] > 20
    assert drive(replace(one, arm="zero")).score.collision


def test_given_a_route_that_leads_out_before_those_who_come_then_guard_and_lane_keep_the_vehicle_from_them(
    workers,
):
    rash, checked, watched, patient = (
        drive(Drive(short("overtake", 3, 9.0), arm, 1, faults), workers=workers)
        for arm, faults in (
            ("no_guard", "hasty"),
            ("no_lane", "hasty"),
            ("full", "hasty"),
            ("watched", "hasty"),
        )
    )
    assert rash.score.collision
    assert rash.score.impact_ms > 10.0
    assert not checked.score.collision
    assert {"guard brake", "guard stop", "guard rebased"} & set(checked.counts)
    assert not watched.score.collision
    assert not patient.score.collision, "arms without faults look before they overtake"


def test_given_times_of_ones_own_then_runs_take_as_long_and_a_death_lasts_as_long_as_they_say(tmp_path):
    table = tmp_path / "times.yaml"
    tiers = "{full: {inference_ms: 40}, medium: {inference_ms: 20}, fast: {inference_ms: 7}}"
    table.write_text(f"perception: {tiers}\nplanning: {{full: {{inference_ms: 2}}}}\nrestart_ms: 700\n")
    own = Drive(short(), "full", times=table).luck()
    perception, planning = (own.times(stage) for stage in ("perception", "planning"))
    assert [perception.run(0, 0, tier, 0).steps.total_ms for tier in range(3)] == [40.0, 20.0, 7.0]
    assert [planning.run(0, 0, tier, 0).steps.total_ms for tier in range(3)] == [2.0, 2.0, 2.0]
    assert perception.restart_ms == 700.0
    assert Drive(short(), "full", times=table, restart_ms=90.0).luck().times("planning").restart_ms == 90.0
    assert Drive(short(), "full").luck().times("planning").restart_ms == RESTART_MS
    with pytest.raises(ConfigError, match="load 4: times .* say what runs take"):
        Drive(short(), "full", 4, times=table).luck()
    table.write_text("perception: 3\n")
    with pytest.raises(ConfigError, match="perception is not there; it has to be like"):
        drive(Drive(short(), "naive", times=table))


def test_given_a_drive_with_times_when_written_then_its_test_has_a_copy_of_them(tmp_path, capsys):
    table = tmp_path / "mine.yaml"
    table.write_text("perception: {full: {inference_ms: 5}}\nplanning: {full: {inference_ms: 2}}\n")
    one = Drive(short(seconds=1.0), "watched", 1, "bench", times=table, restart_ms=100.0)
    assert run_drive(Console(), one, tmp_path / "out", tui=False) == 0
    text = (tmp_path / "out" / "test_ccrb_1_watched.py").read_text()
    assert ', times=Path(__file__).with_name("times.yaml"), restart_ms=100.0))' in text
    assert (tmp_path / "out" / "times.yaml").read_bytes() == table.read_bytes()
    row = json.loads((tmp_path / "out" / "drive.json").read_text())
    assert (row["goes_wrong"], row["times"], row["restart_ms"]) == ("bench", "times.yaml", 100.0)
    compile(text, "test", "exec")


def test_given_a_naive_node_that_is_back_sooner_then_it_may_not_hit_what_it_hit():
    collided = [
        drive(
            Drive(draw_scenario("pedestrian", 2), "naive", 1, "bench", restart_ms=restart_ms)
        ).score.collision
        for restart_ms in (4000.0, 100.0)
    ]
    assert collided == [True, False]


def test_given_a_cameras_images_in_place_of_the_truth_when_driven_then_the_trained_detector_sees_the_car_ahead(
    workers,
):
    found = drive(Drive(short("ccrb", 1, 4.5), "camera"), workers=workers)
    assert not found.score.collision, "a vehicle that keeps its speed hits it after 4.1 s"
    assert found.counts["on_time"] == found.counts["plans"]
    with pytest.raises(ConfigError, match="faults unseen: they are the oracle's"):
        drive(Drive(short("ccrs", 2, 6.0), "camera", 1, "unseen"), workers=workers)


def test_given_a_folder_that_cannot_be_made_when_driven_then_the_error_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*file/out: cannot be made: Not a directory"):
        run_drive(Console(), Drive(draw_scenario("ccrs", 2), "full"), tmp_path / "file" / "out", tui=False)


def test_given_a_log_of_a_drive_when_replayed_then_the_stages_give_the_same_plans(tmp_path, capsys):
    status = run_drive(Console(), Drive(draw_scenario("ccrs", 2), "no_guard"), tmp_path / "out", tui=False)
    assert status == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    test = tmp_path / "out" / "test_ccrs_2_no_guard.py"
    assert written == {"drive.mcap", "drive.yaml", "drive.html", "drive.json", test.name}
    row = json.loads((tmp_path / "out" / "drive.json").read_text())
    assert (row["scenario"], row["seed"], row["collision"]) == ("ccrs", 2, False)
    assert "Time to collision" in (tmp_path / "out" / "drive.html").read_text()
    options = ReplayOptions(params=tmp_path / "out" / "drive.yaml", pace="fast", duration_s=1.0)
    result = replay(tmp_path / "out" / "drive.mcap", options)
    assert result.stage("planning").outcomes["on_time"] >= 18
    assert "no collision" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arm", "load", "faults", "match"),
    [
        ("best", 1, "none", "arm 'best' is not there; it has to be one of: zero, watched, naive"),
        ("zero", 3, "none", "load 3 is not there; it has to be one of: 1, 4"),
        ("zero", 1, "gremlins", "faults 'gremlins' are not there; they have to be one of: none, bench"),
        (
            "zero",
            1,
            "stall=1,gremlins=2",
            "faults 'gremlins=2' cannot be read; .* KIND is one of: stall, gil",
        ),
        ("zero", 1, "stall=often", "faults 'stall=often' cannot be read; it has to be KIND=NUMBER"),
        ("zero", 1, "stall=1e9", "so many a minute, 0 to 60"),
        ("zero", 1, "stall=nan", "faults 'stall=nan' cannot be read"),
        ("zero", 1, "stall=1,nan=2,stall=3", "faults 'stall=1,nan=2,stall=3': names stall twice"),
    ],
)
def test_given_a_word_that_is_not_there_when_driven_then_the_error_says_what_there_is(
    arm, load, faults, match
):
    with pytest.raises(ConfigError, match=match):
        drive(Drive(short(), arm, load, faults))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(-1, 2_000_000),
    rate=st.floats(0.0, 60.0),
    restart_ms=st.none() | st.floats(),
)
@example(seed=440_000, rate=60.0, restart_ms=None)
@example(seed=1, rate=60.0, restart_ms=float("inf"))
@example(seed=1, rate=5e-324, restart_ms=None)
def test_given_any_numbers_when_driven_then_they_are_driven_or_the_error_says_what_would_be_right(
    seed, rate, restart_ms
):
    def go():
        one = Drive(short(seed=seed, seconds=0.3), "naive", 1, f"each={rate!r}", restart_ms=restart_ms)
        return drive(one)

    if 0 <= seed <= 440_000 and (restart_ms is None or 0.0 <= restart_ms <= 3.6e6):
        assert go().world.now_s == pytest.approx(0.3)
    else:
        with pytest.raises(ConfigError, match="is not allowed; it has to be 0 to"):
            go()


# -- checks of the harness


def test_given_the_same_arm_twice_when_driven_then_every_figure_is_the_same():
    drives = [Drive(short("ccrb", seed, 4.0), "naive", 1, "bench") for seed in (1, 2, 1, 2)]
    rows = [drive(one).row() for one in drives]
    assert rows[:2] == rows[2:]


def test_given_a_planner_that_always_brakes_when_scored_then_it_hits_nothing_and_loses_on_progress():
    for name in ("ccrm", "pedestrian"):
        best = driven("zero", name).score
        world = World(draw_scenario(name, 1))
        at_ns = world.start_ns
        while not world.over:
            v = world.vehicle
            plan = plan_along(world.scenario.lane, (v.x, v.y, v.yaw, v.speed), np.empty((0, 7)), 0.1, 2.0)
            world.take(path_bytes(plan, FRAME, at_ns, at_ns))
            at_ns += PERIOD_NS
            world.advance(at_ns)
        braking = score_of(world)
        assert not braking.collision
        assert braking.progress_m < 0.7 * best.progress_m


# -- what is drawn


def kinds(faults, frames=6_000, attempt=0):
    luck, begin = DrawnRuns(1, 1, faults), start_ns(1)
    stages = [luck.times(stage) for stage in ("perception", "planning")]
    for number in range(frames):
        for stage in stages:
            stage.run(begin + number * PERIOD_NS, number, 0, attempt)
    return [kind for _, kind in luck.injected]


def test_given_faults_of_the_bench_when_drawn_then_their_shares_are_those_that_are_documented():
    found = kinds("bench")
    assert found.count("stall") / 12_000 == pytest.approx(0.02, abs=0.004)
    assert found.count("nan") / 12_000 == pytest.approx(0.01, abs=0.003)
    assert found.count("hang") == found.count("sigkill") == pytest.approx(30, abs=2)  # one in 10 s of 300 s
    assert kinds("none", 100) == []


def test_given_faults_by_rate_when_drawn_then_so_many_come_a_minute_and_only_of_these_kinds():
    found = kinds("stall=6,hang=2, nan=0")  # 300 s
    assert set(found) == {"stall", "hang"}
    assert found.count("stall") == pytest.approx(30, abs=12)
    assert found.count("hang") == pytest.approx(10, abs=8)
    assert set(kinds("each=4")) == {"stall", "gil", "raise", "nan", "hang", "sigkill"}
    assert kinds("each=0") == []
    assert kinds("hang=2,each=0") == kinds("each=0,hang=2") == ["hang"] * found.count("hang")
    assert DrawnRuns(1, 1, "blind=6").blind == pytest.approx(0.1)
    assert DrawnRuns(1, 1, "each=6").blind == 0.0


def test_given_faults_of_frames_when_drawn_then_they_hit_whoever_runs_the_frame():
    assert kinds("frame", 2000) == kinds("frame", 2000, attempt=1) != []


def test_given_a_load_when_drawn_then_runs_take_so_much_longer_and_faults_end_them():
    begin = start_ns(1)
    medians = []
    for load in (1, 4):
        times = DrawnRuns(1, load).times("perception")
        medians.append(
            np.median([times.run(begin + n * PERIOD_NS, n, 0, 0).steps.total_ms for n in range(200)])
        )
    assert medians == pytest.approx([25.0, 100.0], rel=0.05)
    luck = DrawnRuns(1, 1, "bench")
    stages = [luck.times(stage) for stage in ("perception", "planning")]
    endings = {stage.run(begin + n * PERIOD_NS, n, 0, 0).ending for n in range(1000) for stage in stages}
    assert endings == {Outcome.ON_TIME, Outcome.ERROR, Outcome.INVALID, Outcome.HUNG, Outcome.CRASHED}


def test_given_a_restart_time_when_nothing_dies_on_the_arm_then_it_is_refused():
    done = CliRunner().invoke(app, ["drive", "--arm", "zero", "--restart-ms", "3"])
    assert (done.exit_code, "--restart-ms: has no effect on the arm zero" in done.output) == (2, True)
