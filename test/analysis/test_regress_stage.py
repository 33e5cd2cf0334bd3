"""What a stage did in two runs: frames that never started."""

import sys
from pathlib import Path

import numpy as np

from torchperf_ros.analysis.regress_run import stage_frames
from torchperf_ros.analysis.regress_stage import _never_started

sys.path.insert(0, str(Path(__file__).parent))
import regress_runs as made


def test_given_numbers_with_gaps_when_viewed_then_the_frames_between_were_never_started():
    rows = made.rows(np.full(3, 20.0))
    rows["seq"] = [0, 2, 5]
    assert _never_started(stage_frames("perception", rows)).tolist() == [False, True, False, True, True, False]


def test_given_a_wrong_number_when_viewed_then_memory_does_not_grow_with_it():
    rows = made.rows(np.full(4, 20.0))
    rows["seq"] = [0, 1, 2**60, 2**62]
    came = _never_started(stage_frames("perception", rows))
    assert (came.size < 1 << 23, int(np.count_nonzero(~came))) == (True, 4)
    assert came.mean() > 0.999
