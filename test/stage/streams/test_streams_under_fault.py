"""What a fault, an overload or an unplugged sensor of one stream must not cost the other streams, nor later frames."""

import time

import pytest

from torchperf_ros.workers.calibration import Batching


def take_together(streams, orders=None):
    """One frame of each stream but the first, which wait for the one worker while it runs the first's; their answers.

    `orders` are those of the second stream's frame.
    """
    with streams[0].running():
        asked = [
            (stream, stream.offer(orders if stream is streams[1] else None, x=float(n)))
            for n, stream in enumerate(streams)
            if n
        ]
    return [stream.answer(seq) for stream, (seq, _) in asked]


def words(answers):
    return [answer.outcome.word for answer in answers]


@pytest.fixture
def start_batched(start_streams):
    def start(**values):
        streams = start_streams(
            "a", "b", "c", "d", adapter="Batched", tiers=["full"], backup="none", **values
        )
        # what the worker found out at its start keeps no frames apart, however busy the machine was then
        streams[0].actor.model.crew.batch_times.measured(Batching(4, "", (((1, 20.0), (4, 20.0)),)))
        return streams

    return start


@pytest.mark.parametrize("other", ["unplugged", "on another tier"])
def test_given_runs_that_were_slow_when_the_machine_is_well_again_then_the_stream_is_soon_in_time(
    start_streams, other
):
    busy, beside = start_streams("busy", "beside", budget_ms=1000.0, **{"beside.budget_ms": 9000.0})
    for _ in range(128):
        busy.actor.ladder.learn(busy.actor.ladder.last, 3000.0, 1.0)
    outcomes = []
    while "on_time" not in outcomes[-2:-1] and len(outcomes) < 12:
        if other != "unplugged":
            assert beside.ask().outcome.word == "on_time"
        outcomes.append(busy.ask().outcome.word)
    assert outcomes[-2:] == ["on_time", "on_time"]


def test_given_a_frame_that_stalls_a_batch_when_its_streams_go_on_then_they_run_alone_until_they_are_well(
    start_batched,
):
    streams = start_batched(budget_ms=1500.0, hang_ms=3000.0, **{"a.budget_ms": 3000.0})
    assert words(take_together(streams, {"do": "spin", "once": False})) == ["late"] * 3
    streams[1].wait_for(lambda: any("worker died" in one.name for one in streams[1].anomalies), "its end")
    streams[0].wait_for_workers()
    before = [stream.counters.batched for stream in streams]
    assert words(take_together(streams)) == ["on_time"] * 3
    assert [stream.counters.batched for stream in streams] == before


def test_given_a_frame_that_breaks_the_common_run_when_it_comes_again_and_again_then_the_others_are_fresh(
    start_batched,
):
    streams = start_batched()
    rounds = [words(take_together(streams, {"do": "break_run", "once": False})) for _ in range(6)]
    assert [each[0] for each in rounds] == ["error"] * 6
    assert sum(word != "on_time" for each in rounds for word in each[1:]) <= 2 * 2, rounds
    assert words(take_together(streams)) == ["on_time"] * 3
    before = streams[1].counters.batched
    take_together(streams)
    assert streams[1].counters.batched == before + 1


def test_given_a_stream_whose_fallback_is_no_backup_when_its_frame_fails_then_it_is_answered_at_once(
    start_streams,
):
    own, other = start_streams("own", "other", **{"own.fallback": ["hold_last", "stop"]})
    own.ask()
    with other.running():  # the worker that would be the backup is busy
        answer = own.ask({"do": "raise", "once": False})
    assert answer.lateness_ms < -2000.0, answer.reason
    own.ask({"do": "raise", "once": False})
    assert own.counters.backups == 0
    other.ask({"do": "raise", "once": False})
    assert other.counters.backups == 1


def test_given_frames_of_different_sizes_in_a_batch_when_over_then_the_sum_of_their_runs_is_what_it_takes(
    start_batched, monkeypatch
):
    # on a busy machine it is most of a run
    monkeypatch.setattr("torchperf_ros.stage.ladder.TierLadder.usual_overhead_ms", lambda *_: 0.0)
    streams = start_batched(options={"sizes": True})
    for _ in range(3):
        assert words(take_together(streams)) == ["on_time"] * 3
    assert streams[0].actor.model.crew.batch_times.predicted_ms(0, 3, 1.0) > 50.0


def test_given_one_slow_batch_when_frames_wait_again_then_they_still_run_together(start_batched):
    streams = start_batched()
    for _ in range(3):
        streams[0].actor.model.crew.batch_times.add(0, 3, 20.0)
    take_together(streams, {"do": "slow_run", "once": False})
    before = sum(stream.counters.batched for stream in streams)
    take_together(streams)
    assert sum(stream.counters.batched for stream in streams) == before + 3


def test_given_a_stream_that_never_had_a_frame_when_the_next_frame_of_all_is_asked_for_then_it_does_not_count(
    start_streams,
):
    busy, _ = start_streams("busy", "unplugged", backup="none")
    for _ in range(4):
        busy.ask()
        time.sleep(0.1)
    busy.ask()
    assert busy.actor.thread.next_frame_ns == busy.actor.arrivals.next_ns


def test_given_a_stream_that_runs_alone_when_frames_may_wait_for_others_then_its_do_not(start_batched):
    streams = start_batched(batch_wait_ms=1000.0)
    assert words(take_together(streams, {"do": "raise", "once": False}))[0] == "error"
    alone, other = streams[1].ask(), streams[2].ask()
    assert (alone.total_ms < 900.0, other.total_ms >= 1000.0) == (True, True), (alone, other)


class SlowToPublish(list):
    def append(self, what):
        time.sleep(0.0008)
        super().append(what)


def test_given_streams_with_one_deadline_when_publishing_takes_time_then_the_last_ones_margin_has_that_of_all(
    start_streams,
):
    streams = start_streams(*"abcdef", backup="none", budget_ms=400.0)
    for stream in streams:
        assert stream.ask().outcome.word == "on_time"
        stream.published = SlowToPublish()
    with streams[0].running():
        asked = [(stream, stream.offer()[0]) for stream in streams[1:]]
        answers = [stream.answer(seq) for stream, seq in asked]
    assert words(answers) == ["late"] * 5
    assert max(stream.actor.margin.ms for stream in streams) > 3.5


def test_given_a_stream_that_is_stopped_twice_when_the_others_go_on_then_they_have_their_workers(
    start_streams,
):
    gone, *others = start_streams("gone", "left", "rear")
    for _ in range(3):
        gone.actor.stop()
    assert [stream.ask().outcome.word for stream in others] == ["on_time"] * 2


def test_given_a_stream_whose_answer_fails_when_others_are_due_as_well_then_they_are_answered(
    start_streams,
):
    """While no worker is idle, frames that wait are looked at when their alarms ring, once."""

    class Slow(list):
        def append(self, what):
            time.sleep(0.1)  # the next two are due meanwhile
            super().append(what)

    class Broken(list):
        def append(self, what):
            raise OSError("the middleware fails")

    busy, slow, broken, well = start_streams(
        "busy", "slow", "broken", "well", backup="none", budget_ms=300.0, **{"busy.budget_ms": 20_000.0}
    )
    for stream in (slow, broken, well):
        assert stream.ask().outcome.word == "on_time"
    slow.published, broken.published = Slow(), Broken()
    with busy.running():
        asked = [stream.offer()[0] for stream in (slow, broken, well)]
        assert well.answer(asked[-1]).outcome.word == "late"


def test_given_a_frame_that_is_too_late_when_a_newer_one_waits_then_it_makes_room_before_its_deadline(
    start_streams,
):
    busy, own = start_streams("busy", "own", backup="none", budget_ms=9000.0)
    own.ask()
    for _ in range(128):
        own.actor.ladder.learn(own.actor.ladder.last, 8700.0, 1.0)
    with busy.running():
        time.sleep(0.4)
        too_late, _ = own.offer()
        time.sleep(0.4)  # of its 9000 ms, a run takes 8700 as a rule
        own.offer()
    answer = own.answer(too_late)
    assert (answer.outcome.word, answer.lateness_ms < -1000.0) == ("late", True), answer.reason


def test_given_a_few_slow_starts_of_runs_when_frames_wait_then_they_still_run_together(start_batched):
    """Beside inference a frame is slow now and then; that not each of a batch is."""
    streams = start_batched(budget_ms=3000.0)
    take_together(streams)
    for stream in streams:
        for number in range(64):
            stream.actor.ladder.learn(0, 1.0, 1500.0 if number % 8 == 0 else 1.0)
    before = sum(stream.counters.batched for stream in streams)
    take_together(streams)
    assert sum(stream.counters.batched for stream in streams) == before + 3


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_given_a_worker_that_fails_at_every_streams_frames_and_one_that_does_not_when_they_go_on_then_it_is_replaced(
    start_streams, fault
):
    front, left = start_streams("front", "left")
    broken, well = front.pids
    orders = {"do": fault, "once": False, "only": broken}
    asked = 0
    while broken in front.pids and asked < 60:
        for stream in (front, left):
            stream.ask(orders)
        asked += 1
    front.wait_for_workers()
    assert broken not in front.pids
    assert well in front.pids
    assert any("failed 3 times where another worker did not" in text for _, text in front.logs)
    assert words([stream.ask(orders) for stream in (front, left) for _ in range(3)]) == ["on_time"] * 6


def test_given_a_stream_whose_every_frame_fails_when_another_goes_on_then_no_worker_is_replaced_for_it(
    start_streams,
):
    bad, well = start_streams("bad", "well")
    pids = set(bad.pids)
    for _ in range(12):
        asked = bad.offer({"do": "raise", "once": False})[0], well.offer()[0]
        assert bad.answer(asked[0]).outcome.word == "error"
        assert well.answer(asked[1]).outcome.word == "on_time"
    assert set(bad.pids) == pids


@pytest.mark.parametrize(("stalls_ms", "hang_ms"), [(2500, 2000.0), (1000, 60_000.0)])
def test_given_a_stream_whose_every_frame_stalls_when_another_goes_on_then_it_always_has_a_worker(
    start_streams, stalls_ms, hang_ms
):
    bad, well = start_streams("bad", "well", budget_ms=1900.0, hang_ms=hang_ms, **{"bad.budget_ms": 100.0})
    end_s, outcomes = time.monotonic() + 8.0, []
    assert well.ask().outcome.word == "on_time"
    while time.monotonic() < end_s:
        bad.offer({"do": "sleep", "ms": stalls_ms, "once": False})
        time.sleep(0.1)
        outcomes.append(well.ask().outcome.word)
    assert outcomes.count("on_time") >= len(outcomes) - 3
    bad.settle_accounts()
    bad.wait_for_workers()
    bad.reconfigure(**{"bad.budget_ms": 1900.0})  # on a busy machine, too
    assert [bad.ask().outcome.word for _ in range(3)][-1] == "on_time"


def test_given_a_stream_whose_late_frame_still_runs_when_its_next_comes_then_the_last_worker_is_kept_for_the_others(
    start_streams, monkeypatch
):
    bad, well = start_streams("bad", "well", budget_ms=1900.0)
    monkeypatch.setattr(bad.actor.thread, "_has_frames", lambda _: True)  # however long the last one is ago
    with bad.running(once=False) as (seq, _):
        assert bad.answer(seq).outcome.word == "late"
        with bad.actor.lock:
            bad.actor.behind = 3
        assert "kept for other streams" in bad.ask().reason
        assert well.ask().outcome.word == "on_time"


def test_given_a_stream_that_is_late_by_load_alone_when_one_worker_is_left_then_it_has_it_as_the_others_do(
    start_streams,
):
    late, well = start_streams("late", "well", budget_ms=1500.0)
    for _ in range(3):
        assert words([late.ask(), well.ask()]) == ["on_time"] * 2
        time.sleep(0.9)  # twice as long without a frame means that no more come: longer than the budget
    gone = late.actor.everyone[0]
    gone.hold()
    try:
        late.actor.behind = 3
        assert words([well.ask(), late.ask()]) == ["on_time"] * 2
    finally:
        gone.go_on(time.monotonic_ns())


def test_given_frames_that_were_quick_when_run_again_when_a_streams_frame_stalls_then_the_others_keep_a_worker(
    start_streams,
):
    bad, *others = start_streams("bad", "left", "rear", budget_ms=500.0, hang_ms=60_000.0)
    rule = bad.actor.hedge_rule
    for _ in range(3):
        rule.retried(in_time=True)
    assert words([stream.ask() for stream in (bad, *others)]) == ["on_time"] * 3
    stalled = bad.offer({"do": "sleep", "ms": 3000, "once": False})[0]
    assert bad.answer(stalled).outcome.word == "late"
    assert words([stream.ask() for _ in range(2) for stream in others]) == ["on_time"] * 4
    assert (bad.counters.backups, rule.allowed, rule.words.partition(":")[0]) == (0, False, "never")
