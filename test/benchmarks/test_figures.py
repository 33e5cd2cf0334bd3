import argparse
import json
import math
import time

import numpy as np
import pytest
import torch

from benchmarks import safety
from benchmarks.failover import Failover, kill_targets
from benchmarks.ramps import LEARNT_S, since_its_ramp
from benchmarks.rig.arguments import add_some
from benchmarks.rig.bench_adapter import POSES
from benchmarks.rig.figures import distribution, share, slope, sparkline
from benchmarks.rig.frames import frame_figures, match
from benchmarks.rig.observer import Output, Row
from benchmarks.rig.ramp_adapter import RampAdapter
from benchmarks.rig.report import Target, plain, shown
from benchmarks.safety import paired_difference, pdms, wilson
from torchperf_ros.api.adapter import Received
from torchperf_ros.api.messages import empty_message
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.telemetry.rows import LABELS

MS = 1_000_000
NAN = math.nan


def row(
    written_ms, *, age_ms=3.0, total_ms=12.0, budget_ms=33.0, outcome=Outcome.ON_TIME, fallback=NAN, tier=0
):
    known = {
        "age_ms": age_ms,
        "total_ms": total_ms,
        "budget_ms": budget_ms,
        "outcome": outcome,
        "fallback": fallback,
        "tier": tier,
        "lateness_ms": total_ms - budget_ms,
    }
    return Row(round(written_ms * MS), tuple(float(known.get(label, 0.0)) for label in LABELS))


def output(written_ms, stamp_ms, *, finite=True):
    return Output(
        round(written_ms * MS), round((written_ms + 0.5) * MS), round(stamp_ms * MS), "pid-1", finite
    )


def test_figures_leave_out_what_is_not_a_number_and_are_unknown_where_nothing_was_measured():
    found, nothing = distribution([1.0, NAN, 2.0, 3.0]), distribution([])
    assert (found["count"], found["p50"], found["max"]) == (3, 2.0, 3.0)
    assert nothing["count"] == 0
    assert math.isnan(nothing["p99_9"])
    assert math.isnan(share(0, 0))
    assert share(1, 4) == 0.25


def test_a_slope_is_that_of_a_straight_line_without_its_first_part_and_unknown_of_two_points():
    assert slope([0, 1, 2, 3, 4], [5, 7, 9, 11, 13]) == (pytest.approx(2.0), pytest.approx(0.0))
    assert slope(range(10), [100, 50, *[7] * 8], last_share=0.8)[0] == 0.0
    assert math.isnan(slope([1, 2], [1, 2])[0])


def test_a_sparkline_goes_from_the_lowest_to_the_highest_block():
    line = sparkline([1, 1, 2, 3], width=4)
    assert (line[0], line[-1], len(line)) == ("▁", "█", 4)


def test_a_target_compares_as_it_says_and_is_not_met_by_what_was_not_measured():
    assert [Target("it", 1.0, relation, 1.0).met for relation in ("<=", ">=", "<", "==")] == [
        True,
        True,
        False,
        True,
    ]
    assert not Target("it", NAN, "<=", 1.0).met


def test_reports_are_json_also_where_figures_are_unknown():
    text = json.dumps(plain({"a": NAN, "b": [math.inf, 1.5], "c": (True, None, "x")}), allow_nan=False)
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": [True, None, "x"]}


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.345, "12.35"), (12345.6, "12346"), (NAN, "-")]
)
def test_numbers_are_shown_with_the_digits_that_matter(value, text):
    assert shown(value) == text


def test_records_find_their_image_and_their_output_if_one_was_published():
    stamps = [round(n * 33.3 * MS) for n in range(10)]
    third_ms = stamps[3] / MS
    outputs = [output(third_ms - 18.0, third_ms - 33.3), output(third_ms + 15.0, third_ms)]
    (frame,) = match(stamps, [row(third_ms + 15.2)], outputs)
    assert (frame.stamp_ns, frame.output) == (stamps[3], outputs[1])
    assert frame.arrival_after_ms == pytest.approx(15.5)
    (frame,) = match([0], [row(33.0, total_ms=30.0, fallback=Fallback.NONE)], [output(10.0, 0.0)])
    assert frame.output is None
    assert math.isnan(frame.arrival_after_ms)


def test_frames_that_were_not_answered_count_as_such():
    stamps = [round(n * 33.3 * MS) for n in range(4)]
    late = row(stamps[1] / MS + 37.1, total_ms=33.5, outcome=Outcome.LATE, fallback=Fallback.HOLD_LAST)
    rows = [row(stamps[0] / MS + 15.2), late]
    outputs = [output(stamps[0] / MS + 15.0, 0.0), output(stamps[1] / MS + 36.9, 0.0, finite=False)]

    found = frame_figures(match(stamps, rows, outputs), sent=4, received=3, started=3)

    assert found["answered_share_of_started"] == pytest.approx(2 / 3)
    assert found["by_deadline_share"] == pytest.approx(1 / 3)
    assert found["by_deadline_plus_1_ms_share"] == pytest.approx(2 / 3)
    assert found["fresh_share_of_sent"] == 0.25
    assert found["not_finite_published"] == 1
    assert found["lateness_ms"]["max"] == pytest.approx(0.5)
    assert found["outcomes"] == {"on_time": 1, "late": 1}
    assert found["fallbacks"] == {"hold_last": 1}


@pytest.mark.parametrize("backup", ["none", "standby"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_kill_that_nobody_came_back_from_misses_the_target_whichever_it_was(backup, order):
    came_back = Failover(outage_ms=20.0)
    assert all(target.met for target in kill_targets({backup: [came_back, came_back]}))

    (target,) = kill_targets({backup: [came_back, Failover()][::order]})

    assert math.isnan(target.value)
    assert not target.met


def test_given_the_rows_of_a_ramp_when_looked_through_then_what_was_before_it_does_not_count():
    def at(second, tier=0, outcome=Outcome.ON_TIME):
        return row(second * 1e3, tier=tier, outcome=outcome)

    late = Outcome.LATE
    rows = [at(0), at(1, 1, late), at(LEARNT_S + 1), at(LEARNT_S + 2, 1), at(LEARNT_S + 3, 0, late)]
    found = since_its_ramp(rows)
    assert (found.frames, found.first_down_s, found.first_miss_s, found.misses) == (3, 2.0, 3.0, 1)
    assert found.led_down
    assert not since_its_ramp([rows[0], rows[4], at(LEARNT_S + 4, 1)]).led_down


def test_given_a_model_that_waits_when_its_ramp_is_over_then_a_run_takes_longer():
    options = {"base_ms": 4.0, "after_s": 0.0, "ramp_s": 1e-6, "seed": 1}
    adapter = RampAdapter(options, torch.device("cpu"))
    image = empty_message(
        "sensor_msgs/msg/Image", height=72, width=128, data=np.zeros(72 * 128 * 3, np.uint8)
    )
    tensors = adapter.preprocess({"image": Received(image, 0, 0.0)})
    began = time.perf_counter()
    assert adapter.build("full")(*tensors).shape == (1, POSES)
    assert time.perf_counter() - began > 0.8 * 1.5 * 4e-3


def test_a_collision_or_the_road_left_leaves_nothing_of_a_score_and_a_slow_drive_half_of_its_progress():
    fine = {
        "collision": False,
        "min_ttc_s": 2.0,
        "progress_m": 100.0,
        "comfortable": True,
        "left_road": False,
    }
    assert pdms(fine, 100.0) == 1.0
    assert pdms({**fine, "progress_m": 50.0}, 100.0) == pytest.approx(9.5 / 12)
    assert pdms({**fine, "min_ttc_s": 0.9}, 100.0) == pytest.approx(7 / 12)
    assert pdms({**fine, "comfortable": False}, 100.0) == pytest.approx(10 / 12)
    assert pdms({**fine, "collision": True}, 100.0) == pdms({**fine, "left_road": True}, 100.0) == 0.0


def test_the_interval_of_a_difference_holds_its_mean_and_excludes_zero_where_pairs_differ():
    first, second, groups = [0.0] * 40, [float(number % 2) for number in range(40)], ["a"] * 20 + ["b"] * 20
    found = paired_difference(first, second, groups)
    assert found["mean"] == -0.5
    assert found["low"] < -0.5 < found["high"] < 0.0
    assert found["excludes_zero"]
    same = paired_difference(second, second, groups)
    assert same == {"mean": 0.0, "low": 0.0, "high": 0.0, "excludes_zero": False}


def test_an_option_of_names_takes_those_it_knows_once_each_and_has_a_default(capsys):
    parser = argparse.ArgumentParser()
    add_some(parser, "--parts", {"one": 1, "two": 2})
    add_some(parser, "--arms", ("a", "b", "c"), ("a", "b"))
    assert vars(parser.parse_args([])) == {"parts": ["one", "two"], "arms": ["a", "b"]}
    assert parser.parse_args(["--parts", "two, one,two", "--arms", "c"]).parts == ["two", "one"]
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--parts", "one,three"])
    assert "argument --parts: 'three' is none of one, two" in capsys.readouterr().err


def test_given_few_hits_when_the_share_is_asked_for_then_its_interval_is_wilsons():
    assert wilson(0, 48) == pytest.approx((0.0, 0.0741), abs=1e-3)
    assert wilson(7, 48) == pytest.approx((0.0725, 0.2717), abs=1e-3)
    assert wilson(48, 48) == pytest.approx((0.9259, 1.0), abs=1e-3)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--faults", "gremlins", "faults 'gremlins' are not there; they have to be one of"),
        ("--seed", "440000", "seed 440009 is not allowed; it has to be 0 to 440000"),
    ],
)
def test_given_what_no_drive_can_have_when_safety_is_measured_then_it_says_so_before_it_drives(
    option, value, why, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["safety", "--parts", "drives", option, value])
    with pytest.raises(SystemExit):
        safety.main()
    assert why in " ".join(capsys.readouterr().err.split())
