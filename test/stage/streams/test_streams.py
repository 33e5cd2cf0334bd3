"""Streams of one stage: one pool, and for each stream its own mailbox, deadline, health and answers."""

import random
import time
from dataclasses import replace

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.replay.log_feed import absolute
from torchperf_ros.stage.wiring import StageInput, Wiring
from torchperf_ros.workers.calibration import Calibration

from ..conftest import wait_until
from .test_streams_under_fault import take_together, words

TRIGGER = "geometry_msgs/msg/PointStamped"


@pytest.fixture(scope="module")
def streams(start_streams):
    return start_streams("front", "left", "rear")


def test_given_streams_when_started_then_they_share_one_pair_of_workers(streams):
    assert len({id(stream.actor.pool) for stream in streams}) == 1
    assert [len(stream.actor.everyone) for stream in streams] == [2, 0, 0]
    assert [stream.actor.inputs for stream in streams] == [
        [(0, f"{name}/point", TRIGGER)] for name in ("front", "left", "rear")
    ]


def test_given_frames_of_all_streams_at_once_when_answered_then_each_stream_has_its_own(streams):
    asked = [(stream, stream.offer(x=float(x))) for x, stream in enumerate(streams)]
    for x, (stream, (seq, _)) in enumerate(asked):
        answer = stream.answer(seq)
        assert answer.outcome.word == "on_time", answer.reason
        assert stream.payload(answer).poses[0].pose.position.x == x


@pytest.mark.parametrize("fault", ["raise", "nan", "sigkill"])
def test_given_a_fault_in_one_stream_when_the_others_go_on_then_it_costs_them_two_fresh_answers_at_most(
    streams, fault
):
    front, *others = streams
    bad = front.offer({"do": fault, "once": False})[0]
    answers = [stream.ask(x=1.0) for _ in range(5) for stream in others]
    assert front.answer(bad).outcome.word != "on_time"
    assert sum(answer.outcome.word != "on_time" for answer in answers) <= 2
    front.wait_for_workers()
    assert front.ask().outcome.word == "on_time"


def test_given_a_worker_that_died_at_one_streams_frame_when_told_then_one_alert_names_that_stream(streams):
    _, left, _ = streams
    before = [len(stream.anomalies) for stream in streams]
    left.ask({"do": "sigkill", "once": False})
    left.wait_for_workers()
    died = [
        alert.name
        for stream, count in zip(streams, before, strict=True)
        for alert in stream.anomalies[count:]
        if "worker died" in alert.name
    ]
    assert died == ["tested.left: worker died"]


def test_given_a_stream_without_frames_when_the_others_have_some_then_it_alone_is_waiting(start_streams):
    busy, unplugged = start_streams("busy", "unplugged", input_timeout_ms=300.0)
    wait_until(lambda: busy.ask() and unplugged.health.name == "WAITING", lambda: unplugged.health)
    healths, answer = [one.actor.statistics.health for one in (busy, unplugged)], busy.ask()
    # when the frame came, however long ago that is
    assert [one.state(answer.frame.received_ns).name for one in healths] == ["NOMINAL", "WAITING"]
    assert healths[1].state(unplugged.ask().frame.received_ns).name != "WAITING"


def test_given_frames_that_wait_when_a_worker_is_free_then_the_earliest_deadline_goes_first(start_streams):
    late, early, first = start_streams(
        "late",
        "early",
        "first",
        backup="none",
        budget_ms=9000.0,
        **{"early.budget_ms": 8000.0, "first.priority": 1},
    )
    with first.running():
        waiting = [late.offer(), early.offer()]
    ran = late.answer(waiting[0][0]), early.answer(waiting[1][0])
    assert ran[1].published_ns < ran[0].published_ns
    with early.running():
        waiting = [late.offer(), first.offer()]
    ran = late.answer(waiting[0][0]), first.answer(waiting[1][0])
    assert ran[1].published_ns < ran[0].published_ns


def test_given_a_stream_with_a_budget_of_its_own_when_changed_live_then_only_that_stream_changes(streams):
    front, left, _ = streams
    front.reconfigure(budget_ms=4000.0)
    try:
        assert (front.ask().budget_ms, left.ask().budget_ms) == (4000.0, 5000.0)
        assert front.actor.pool.config.name == "tested"
    finally:
        front.reconfigure()


@pytest.mark.parametrize("seed", [1, 2])
def test_given_drawn_frames_and_faults_when_all_is_over_then_every_frame_of_every_stream_became_something(
    streams, seed
):
    draw = random.Random(seed)
    for _ in range(60):
        number = draw.randrange(len(streams))
        orders = draw.choice([None] * 6 + [{"do": "raise"}, {"do": "nan"}, {"do": "sigkill"}])
        streams[number].offer(orders, x=float(number))
        time.sleep(draw.choice([0.0, 0.0, 0.005, 0.03]))
    for number, stream in enumerate(streams):
        stream.settle_accounts()
        made = {stream.payload(one).poses[0].pose.position.x for one in stream.answers[-5:] if one.payload}
        assert made <= {float(number), number + 1000.0, 1.0, 0.0}
    streams[0].wait_for_workers()


def test_given_two_streams_of_one_topic_when_wired_then_the_message_names_both(streams):
    stages = [stream.actor for stream in streams[:2]]

    def wired(topic, whole_name=str):
        taken = [
            [StageInput(stage, 0, one, TRIGGER, stamped=True)]
            for stage, one in zip(stages, ("/image", topic), strict=True)
        ]
        return Wiring(stages, taken, whole_name)

    with pytest.raises(ConfigError, match=r"tested\.streams: front and left both take /image"):
        wired("/image")
    assert [source.topic for source in wired("image").from_topics] == ["/image", "image"]
    with pytest.raises(ConfigError, match=r"front and left both take /image"):
        wired("image", absolute)


def test_given_one_output_topic_written_in_two_ways_when_wired_then_the_message_names_both(streams):
    front, left, rear = (stream.actor for stream in streams)
    after = StageInput(rear, 0, "left/path", TRIGGER, stamped=True)
    wiring = Wiring([front, left, rear], [[], [], [after]], absolute)
    assert wiring.published == {"/front/path", "/left/path", "/rear/path"}
    assert (wiring.followers, wiring.from_topics) == ([[], [after], []], [])
    message = r"parameter tested\.rear\.output: tested\.front and tested\.rear both publish /one"
    with pytest.raises(ConfigError, match=message):
        Wiring([front, left, rear], [[]] * 3, lambda topic: "/left" if "left" in topic else "/one")


def test_given_streams_with_budgets_of_their_own_when_a_worker_is_judged_then_the_shortest_counts(
    start_streams,
):
    slow, fast = start_streams("slow", "fast", budget_ms=9000.0, **{"fast.budget_ms": 70.0})
    assert slow.actor.pool.config.budget_ms == 70.0
    slow.actor.reconfigure(replace(slow.actor.config, budget_ms=60.0))
    assert fast.actor.pool.config.budget_ms == 60.0
    slow.actor.reconfigure(replace(slow.actor.config, budget_ms=9000.0))
    fast.actor.reconfigure(replace(fast.actor.config, budget_ms=80.0))
    assert fast.actor.pool.config.budget_ms == 80.0


def test_given_a_stream_with_a_frame_at_all_times_when_another_stepped_down_then_probes_take_it_up_again(
    start_streams,
):
    busy, lower = start_streams("busy", "lower", backup="standby", budget_ms=60_000.0, hang_ms=200_000.0)
    ladder = lower.actor.ladder
    ladder.calibrate([Calibration(40_000.0, 90_000.0), Calibration(0.0, 0.0)])

    def is_up():
        lower.ask()
        return ladder.level == 0

    lower.ask()
    assert ladder.level == 1
    with busy.running():
        wait_until(is_up, lambda: ladder.explain(["full", "fast"], time.monotonic_ns()))
    assert lower.counters.probes == 3


@pytest.fixture(scope="module")
def batched(start_streams):
    return start_streams("a", "b", "c", "d", adapter="Batched", tiers=["full"], backup="none", batch="auto")


def batched_frames(streams):
    return [stream.counters.batched for stream in streams]


def test_given_frames_of_several_streams_that_wait_when_the_worker_is_free_then_they_run_together(batched):
    before = batched_frames(batched)
    for number, answer in enumerate(take_together(batched), start=1):
        assert answer.outcome.word == "on_time", answer.reason
        assert batched[number].payload(answer).poses[0].pose.position.x == number
        batched[number].settle_accounts()
    assert [now - was for now, was in zip(batched_frames(batched), before, strict=True)] == [0, 1, 1, 1]
    assert batched[0].actor.batch_words == "up to 4 frames in one run"


def test_given_a_frame_that_kills_its_worker_in_a_batch_when_over_then_its_streams_run_alone_until_they_are_well(
    batched,
):
    answers = take_together(batched, {"do": "sigkill", "once": False})
    assert words(answers) == ["crashed"] * 3
    batched[0].wait_for_workers()
    before = batched_frames(batched)
    assert words(take_together(batched)) == ["on_time"] * 3
    assert batched_frames(batched) == before
    assert words(take_together(batched)) == ["on_time"] * 3
    assert batched_frames(batched) == [was + (n > 0) for n, was in enumerate(before)]


def test_given_a_frame_that_fails_in_a_batch_when_answered_then_the_others_in_it_are_well(batched):
    answers = take_together(batched, {"do": "raise", "once": False})
    assert words(answers) == ["error", "on_time", "on_time"]
