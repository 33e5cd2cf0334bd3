"""What the benchmark of `torchperf compare` simulates and counts."""

import numpy as np
import pytest

from benchmarks.regress import STAGE, Cell, LatencyModel, Slower, count, save
from torchperf_ros.observe.runs.changes import stage_frames
from torchperf_ros.replay.run_reading import load_run

LONG = 30_000


@pytest.mark.parametrize("tail_only", [False, True])
def test_given_a_change_when_drawn_then_the_p99_is_longer_by_it_and_the_rest_as_said(tail_only):
    model, change = LatencyModel(0.0, 0.002), Slower(0.05, tail_only)
    before, after = (
        model.run(LONG, np.random.default_rng(1), one).frames[STAGE]["total_ms"] for one in (None, change)
    )
    assert np.quantile(after, 0.99) == pytest.approx(1.05 * np.quantile(before, 0.99), rel=0.01)
    assert np.quantile(after, 0.5) == pytest.approx((1.0 if tail_only else 1.05) * np.quantile(before, 0.5))


def test_given_a_cell_when_counted_then_every_pair_has_a_verdict_and_the_same_seed_gives_the_same():
    counts = count(Cell(0.5, 0.002, 600, "all frames"), 2, 200, 1)
    assert counts == count(Cell(0.5, 0.002, 600, "all frames"), 2, 200, 1)
    assert counts.p99_worse + counts.p99_equivalent + counts.p99_unknown == 2
    assert counts.intervals["p50"] == 2
    assert counts.alarms >= 1


def test_given_a_folder_when_runs_are_saved_then_they_can_be_read(tmp_path):
    save(tmp_path / "runs", 1)
    main, branch, burst = (
        stage_frames(load_run(tmp_path / "runs" / f"{name}.json").stage(STAGE))
        for name in ("main", "branch", "burst")
    )
    assert len(main) == 9000
    assert 1 - branch.on_time.mean() == pytest.approx(0.03, abs=0.02)
    assert 1 - burst.on_time.mean() == pytest.approx(0.61, abs=0.02)
