"""Outputs of two versions, compared in a process of its own."""

import math

import pytest

from test.stage.conftest import wait_until
from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.fleet import comparer
from torchperf_ros.fleet.comparer import OutputComparer
from torchperf_ros.safety.guard import Guard
from torchperf_ros.settings.safety_options import guard_options

PATH = "nav_msgs/msg/Path"
SCORER = """
import time

from torchperf_ros.models.camera import CameraAdapter


class Scorer(CameraAdapter):
    def score_messages(self, output, reference):
        print("on its way")
        x = output.poses[0].pose.position.x
        if x == 7.0:
            time.sleep(60.0)
        if x == 8.0:
            raise ValueError("eight")
        return x - reference.poses[0].pose.position.x
"""


def plan(x, second=1.0):
    poses = [empty_message("geometry_msgs/msg/PoseStamped", header=header(at, "map")) for at in (0, 10**9)]
    for pose, place in zip(poses, (x, second), strict=True):
        pose.pose.position.x, pose.pose.orientation.w = place, 1.0
    return bytes(encode(empty_message(PATH, header=header(0, "map"), poses=poses), PATH))


@pytest.fixture
def compare(monkeypatch):
    """Compare outputs as often as asked, not only in idle time; the process ends with the test."""
    monkeypatch.setattr(
        comparer, "_ENTRY", comparer._ENTRY[comparer._ENTRY.index("from torchperf_ros.fleet") :]
    )
    made = []

    def compare(base, candidate, known=None, **given):
        made[:] = made or [OutputComparer(PATH, 0.1, **given)]
        assert made[0].offer(5, base, candidate, known)
        found, left_out = [], made[0].left_out
        wait_until(
            lambda: found.append(made[0].take()) or found[-1] or made[0].left_out > left_out,
            lambda: "an end",
        )
        return found[-1], made[0]

    yield compare
    made[0].close()


def test_given_two_outputs_when_compared_then_differences_refusals_and_what_did_not_fit_are_told(compare):
    found, own = compare(plan(0.0), plan(0.05))
    assert (found.seq, found.difference, found.refusals, found.score) == (5, "", ["", ""], None)
    guard = Guard(guard_options({"guard.act": ["finite"]}))
    known = guard.known(0, 0, 0.0)
    found, _ = compare(plan(0.0), plan(1.0, math.nan), known)
    assert found.difference == "poses[0].pose.position.x is 1.0, in the base 0.0"
    assert found.refusals[0] == ""
    assert found.refusals[1].startswith("finite: the plan ")
    assert not own.offer(6, plan(0.0), bytes(1 << 20), None)
    assert own.left_out == 1


def test_given_an_adapter_with_a_score_of_its_own_then_it_is_told_and_one_that_hangs_or_raises_ends_nothing(
    compare, tmp_path, monkeypatch
):
    (tmp_path / "scorer.py").write_text(SCORER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    scorer = {"adapter": "scorer:Scorer", "options": {}}
    wait_until(lambda: compare(plan(0.0), plan(0.5), scorer=scorer)[0].score == 0.5, lambda: "the adapter")
    found, own = compare(plan(0.0), plan(8.0))
    assert (found.score, own.problem) == (None, "score_messages failed: ValueError: eight")
    found, own = compare(plan(0.0), plan(0.5))
    assert (found.score, own.problem) == (0.5, "")
    monkeypatch.setattr(comparer, "_HUNG_S", 0.1)
    _, own = compare(plan(0.0), plan(7.0))
    assert own.problem == "outputs are not compared: the process that does it gave no answer for 0 s"
    assert own.left_out == 1
    assert not own.offer(6, plan(0.0), plan(0.5), None)  # it waits before it starts another


def test_given_a_user_who_may_have_small_pipes_only_when_a_pair_is_larger_then_it_is_left_out_and_nobody_waits(
    compare, monkeypatch
):
    monkeypatch.setattr(comparer, "_PIPE_BYTES", 1 << 16)
    _, own = compare(plan(0.0), plan(0.05))
    assert not own.offer(6, plan(0.0), bytes(1 << 16), None)
    assert own.left_out == 1
    found, _ = compare(plan(0.0), plan(0.05))
    assert found.difference == ""
