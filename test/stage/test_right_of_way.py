"""Stages of different priority: the lower one's frame is not begun where the higher one has a frame due."""

import math
import os
import random
from types import SimpleNamespace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.settings.config import node_config, stage_config
from torchperf_ros.stage.right_of_way import NEVER_NS, Arrivals, RightOfWay, expected_ns, set_right_of_way
from torchperf_ros.workers.worker_setup import worker_setup

from .conftest import MS, wait_until

times = st.integers(0, 10**15)


@given(times, st.integers(1, 10**10), times)
def test_given_frames_with_a_period_when_asked_then_the_next_is_never_past_and_no_longer_expected_after_two(
    last_ns, period_ns, after_ns
):
    now_ns = last_ns + after_ns
    due_ns = expected_ns(last_ns, period_ns, now_ns)
    if after_ns > 2 * period_ns:
        assert due_ns == NEVER_NS
    else:
        assert due_ns == max(now_ns, last_ns + period_ns)
    assert expected_ns(last_ns, 0, now_ns) == NEVER_NS


class StageOnPaper:
    def __init__(self, name="low", priority=0, due_ns=NEVER_NS, device="cpu"):
        self.config = SimpleNamespace(name=name, stage=name, priority=priority)
        self.runs_on_cpu = device == "cpu"
        self.at_ns, self.way, self.lower = due_ns, None, []

    def due_ns(self, now_ns):
        return max(self.at_ns, now_ns)

    def give_way(self, way):
        self.way = way


@given(st.lists(st.integers(0, 100), max_size=3), st.integers(0, 100), st.integers(0, 100))
def test_given_higher_stages_when_a_run_would_end_after_the_first_is_due_then_it_is_blocked(
    due_ms, now_ms, run_ms
):
    higher = [StageOnPaper(f"s{at}", 1, at * MS) for at in due_ms]
    way = RightOfWay(StageOnPaper(), higher, has_own_cores=False)
    blocked = way.blocks(now_ms * MS, float(run_ms))
    first = min((max(at, now_ms) for at in due_ms), default=1000)
    assert (blocked is not None) == (now_ms + run_ms > first)
    if blocked is not None:
        at_ns, why = blocked
        assert at_ns == (first + 5) * MS
        assert why.startswith("not begun: stage s")
        assert ("had a frame to answer" in why) == (first == now_ms)


def test_given_a_run_that_is_always_too_long_when_nothing_is_in_flight_then_it_is_tried_ever_more_rarely():
    high = StageOnPaper("high", 1)
    way = RightOfWay(StageOnPaper(), [high], has_own_cores=False)
    begun_s = []
    for now_ms in range(0, 300_000, 10):
        high.at_ns = (now_ms + 5) * MS
        if way.blocks(now_ms * MS, 50.0) is None:
            begun_s.append(now_ms / 1000)
    assert begun_s == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 191.0, 255.0]
    high.at_ns = 300_005 * MS
    assert way.blocks(300_000 * MS, 1.0) is None  # it fits, and costs nothing
    high.at_ns = 360_005 * MS
    assert way.blocks(360_000 * MS, 50.0) is not None
    high.at_ns = 364_005 * MS
    assert way.blocks(364_000 * MS, 50.0) is None
    high.at_ns = 0
    assert way.blocks(900_000 * MS, 50.0) is not None  # a frame in flight: never


def driven(missed_alone, missed_beside, seconds, way, high, draw, start_ms=0):
    """Higher frames every 33 ms that take 12, lower ones every 21 ms that take 15, some of which begin.

    Returns the share of the lower ones that began, and of the higher ones that were missed.
    """
    begun = asked = missed = frames = 0
    run_ends_ms, due_ms = -1.0, float(start_ms)
    for now_ms in range(start_ms, start_ms + round(seconds * 1000), 3):
        if now_ms >= due_ms + 12:
            beside = run_ends_ms >= due_ms
            is_missed = draw.random() < (missed_beside if beside else missed_alone)
            frames, missed, due_ms = frames + 1, missed + is_missed, due_ms + 33
            way.answered(now_ms * MS, missed=is_missed, beside_a_run=beside)
        high.at_ns = round(due_ms * MS)
        if now_ms % 21 == 0 and now_ms >= run_ends_ms:
            asked += 1
            if way.blocks(now_ms * MS, 25.0) is None:
                begun, run_ends_ms = begun + 1, now_ms + 15
    return begun / asked, missed / frames


@pytest.mark.parametrize(
    ("alone", "beside", "begun", "rise"),
    [
        (0.0, 0.0, (0.95, 1.0), 0.0),  # nothing is to be gained
        (0.2, 0.2, (0.6, 1.0), 0.06),  # nor where other programs take the machine
        (0.002, 0.004, (0.8, 1.0), 0.003),
        (0.0, 0.45, (0.0, 0.05), 0.004),  # runs take the deadlines of the higher stage: they give way
        (0.05, 0.3, (0.0, 0.25), 0.05),
    ],
)
def test_given_what_runs_cost_the_higher_stage_when_measured_then_the_lower_one_gives_way_only_where_that_helps(
    alone, beside, begun, rise
):
    high, draw = StageOnPaper("high", 1), random.Random(1)
    way = RightOfWay(StageOnPaper(), [high], has_own_cores=False)
    found, missed = driven(alone, beside, 240, way, high, draw)
    assert begun[0] <= found <= begun[1]
    assert missed - alone <= rise


def test_given_runs_that_begin_or_cease_to_cost_deadlines_when_time_passes_then_the_lower_stage_follows():
    high, draw = StageOnPaper("high", 1), random.Random(1)
    way = RightOfWay(StageOnPaper(), [high], has_own_cores=False)
    assert driven(0.0, 0.0, 60, way, high, draw)[0] > 0.9
    begun, missed = driven(0.0, 0.5, 120, way, high, draw, 60_000)
    assert begun < 0.1
    assert missed < 0.01
    driven(0.0, 0.0, 900, way, high, draw, 180_000)
    assert driven(0.0, 0.0, 60, way, high, draw, 1_080_000)[0] > 0.9


def test_given_a_virtual_replay_when_set_up_then_its_right_of_way_learns_nothing():
    low, high = StageOnPaper(), StageOnPaper("high", 1, 0)
    set_right_of_way([high, low], node_config({}, {}), 0)
    for number in range(1000):
        low.way.answered(number * MS, missed=False, beside_a_run=True)
    assert low.way.blocks(0, 1.0) is not None


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 100)), min_size=1, max_size=20))
def test_given_runs_when_asked_then_the_longest_of_the_last_16_s_counts_and_after_those_the_guess(runs):
    high = StageOnPaper("high", 1)
    way = RightOfWay(StageOnPaper(), [high], has_own_cores=False)
    now_ms, ended = 0, []
    for after_ms, took_ms in runs:
        now_ms += after_ms
        way.ran(float(took_ms), now_ms * MS)
        ended.append((now_ms, took_ms))
        longest = max(ms for at_ms, ms in ended if now_ms - at_ms <= 16_000)
        high.at_ns = (now_ms + longest) * MS
        assert way.blocks(now_ms * MS, 0.0) is None
        high.at_ns -= MS
        assert way.blocks(now_ms * MS, 0.0) is not None
    high.at_ns = (now_ms + 16_002) * MS
    assert way.blocks((now_ms + 16_001) * MS, 1.0) is None


@pytest.mark.parametrize(
    ("threads", "cores", "device", "blocked"),
    [
        (1, 2, "cpu", True),
        (1, 3, "cpu", False),
        (1, 3, "cuda:0", True),
        (0, 64, "cpu", True),
        (2, 0, "cpu", True),
    ],
)
def test_given_a_core_for_every_thread_when_asked_then_only_stages_on_a_gpu_give_way(
    threads, cores, device, blocked
):
    low, high = StageOnPaper(device=device), StageOnPaper("high", 1, 0, device)
    set_right_of_way([high, low], node_config({"worker_threads": threads}, {}), cores)
    assert high.way is None
    assert (low.way.blocks(0, 1.0) is not None) == blocked
    assert (high.lower, low.lower) == ([low], [])


def test_given_priorities_when_set_up_then_workers_of_lower_stages_are_nicer():
    own = {
        name: {"adapter": "m:C", "output": name, "priority": value}
        for name, value in {"a": 2, "b": 0, "c": 2, "d": -3, "e": -9}.items()
    }
    node = node_config({"stages": list(own)}, own)
    assert [worker_setup(stage, node).nice for stage in node.stages] == [0, 10, 0, 19, 19]
    alone = stage_config("a", own["a"])
    assert worker_setup(alone, node_config({}, {})).nice == 0


def test_given_a_lower_stage_with_real_workers_when_its_right_of_way_says_no_then_a_fallback_says_why_and_it_waits_else(
    start_own_stage,
):
    stage = start_own_stage(priority=-1, fallback=["hold_last", "none"], tiers=["full"])

    def found():  # while it loads beside another worker it is nicer still
        tasks = [int(task) for pid in stage.pids for task in os.listdir(f"/proc/{pid}/task")]
        return {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}

    wait_until(lambda: found() == {10}, found)
    assert stage.ask(x=1.0).outcome is Outcome.ON_TIME
    high = StageOnPaper("high", 1, due_ns=0)
    stage.actor.give_way(RightOfWay(stage.actor, [high], has_own_cores=False))
    stage.reconfigure(budget_ms=50.0)
    answer = stage.ask(x=2.0)
    assert (answer.outcome, answer.fallback, answer.tier) == (Outcome.LATE, Fallback.HOLD_LAST, -1)
    assert "not begun: stage high, of higher priority, had a frame to answer" in answer.reason
    stage.wait_for_workers()
    stage.reconfigure()
    seq, _ = stage.offer(x=3.0)
    high.at_ns = NEVER_NS  # the other one is done
    stage.actor.look_again()
    assert stage.answer(seq).outcome is Outcome.ON_TIME
    assert stage.payload(stage.answer(seq)).poses[0].pose.position.x == 3.0


class DueLater(StageOnPaper):
    """A higher stage that has a frame once it was asked twice: when another one has begun."""

    asked = 0

    def due_ns(self, now_ns):
        self.asked += 1
        return NEVER_NS if self.asked <= 2 else now_ns


def test_given_a_lower_stage_whose_run_fails_when_a_higher_one_has_a_frame_then_no_backup_begins(
    start_own_stage,
):
    stage = start_own_stage(priority=-1, backup="standby", fallback=["backup", "hold_last"], tiers=["full"])
    assert stage.ask(x=1.0).outcome is Outcome.ON_TIME
    stage.wait_for_workers()
    for high, budget_ms, fallback in (
        (DueLater("high", 1), 1000.0, Fallback.HOLD_LAST),
        (StageOnPaper("high", 1), 5000.0, Fallback.BACKUP),
    ):
        stage.reconfigure(budget_ms=budget_ms)
        stage.actor.give_way(RightOfWay(stage.actor, [high], has_own_cores=False))
        answer = stage.ask({"do": "raise", "once": True})
        assert (answer.outcome, answer.fallback) == (Outcome.ERROR, fallback)
        stage.wait_for_workers()


class FramesOnPaper(StageOnPaper):
    """A higher stage, 30 Hz with some jitter, whose frames take 12 ms."""

    def __init__(self, draw):
        super().__init__("high", 1)
        self.draw, self.arrivals, self.next_ns, self.busy_until_ns, self.frames = (
            draw,
            Arrivals(),
            33 * MS,
            0,
            0,
        )

    def due_ns(self, now_ns):
        return now_ns if now_ns < self.busy_until_ns else self.arrivals.expected_ns(now_ns)

    def frame(self):
        self.arrivals.add(SimpleNamespace(received_ns=self.next_ns, comes_from_a_stage=False))
        self.busy_until_ns = self.next_ns + 12 * MS
        self.next_ns += round(self.draw.gauss(33.3, 0.5) * MS)
        self.frames += 1


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))
@given(st.integers(0, 1000), st.integers(5, 15), st.floats(0.02, 0.3), st.floats(0.0, 0.01))
def test_given_runs_that_vary_when_a_lower_stage_begins_what_fits_then_few_higher_frames_find_one_going(
    seed, median_ms, sigma, stalls
):
    """Two minutes.

    The lower stage always has a frame. Its runs are log-normal; a few take 2 to 6 times as long.
    """
    draw = random.Random(seed)
    high = FramesOnPaper(draw)
    way = RightOfWay(StageOnPaper(), [high], has_own_cores=False)
    now_ns = ends_ns = overlaps = runs = 0
    running = False
    while now_ns < 120_000 * MS:
        now_ns = min(high.next_ns, ends_ns)
        if now_ns == high.next_ns:
            high.frame()
            overlaps += running and ends_ns > now_ns
        elif blocked := way.blocks(now_ns, median_ms * math.exp(2.33 * sigma)):  # their p99
            ends_ns, running = blocked[0], False
        else:
            stall = draw.uniform(2, 6) if draw.random() < stalls else 1.0
            took_ms = median_ms * draw.lognormvariate(0, sigma) * stall
            ends_ns, running, runs = now_ns + round(took_ms * MS), True, runs + 1
            way.ran(took_ms, ends_ns)
    assert runs > 10
    assert overlaps <= 0.005 * high.frames
