"""Streams of one stage: one pool, and for each stream its own mailbox, deadline, histories and answers."""

import pytest


@pytest.fixture(scope="module")
def streams(start_streams):
    return start_streams("front", "left", "rear")


def test_given_streams_when_each_gets_a_frame_then_each_answers_its_own(streams):
    for x, stream in enumerate(streams):
        answer = stream.ask(x=float(x))
        assert answer.outcome.word == "on_time", answer.reason
        assert stream.payload(answer).poses[0].pose.position.x == x


def test_given_streams_when_started_then_they_have_one_pair_of_workers(streams):
    pools = {id(stream.actor.pool) for stream in streams}
    assert len(pools) == 1
    assert [len(stream.actor.everyone) for stream in streams] == [2, 0, 0]
