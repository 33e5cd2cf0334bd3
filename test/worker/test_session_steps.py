"""An anytime model in a worker's session.

Its partial results, how it is stopped, and what is wrong with one.
"""

import pytest
import torch

from torchperf_ros.api.errors import AdapterError, ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.protocol import OBSERVE, RUN, Request, unpack_response

# a fixture for these tests, too
from .test_session import RESULT_BYTES, Doubling, Scale, make_node  # noqa: F401

LEAVE_NS = 1 << 62
STEPS = 3


class Refining(Scale):
    """The number, then twice, then three times as much, times the tier's factor.

    `at` is called before each step.
    """

    def forward(self, x):
        return STEPS * super().forward(x)

    def steps(self, x):
        for number in range(1, STEPS + 1):
            y = Anytime.at(number, x)
            yield number * super().forward(x) if y is None else y


class Anytime(Doubling):
    anytime = True
    at = staticmethod(lambda number, x: None)

    def build(self, tier):
        return Refining({"full": 2.0, "fast": 10.0}[tier])


class Misshapen(Anytime):
    def steps(self, model, inputs):
        return iter([torch.ones(1), torch.ones(2)])


class Stepless(Anytime):
    def steps(self, model, inputs):
        return iter([])


@pytest.fixture
def open_node(make_node):  # noqa: F811 - the fixture
    return lambda adapter="Anytime", **setup: make_node(f"{__name__}:{adapter}", **setup)


@pytest.fixture
def node(open_node):
    return open_node().start()


def ask(node, seq, value, **fields):
    """A run of a frame that somebody waits for, or whatever the fields say."""
    request = Request(RUN | OBSERVE, 0, seq, *node.write(seq, value), **{"leave_ns": LEAVE_NS, **fields})
    node.frames.send(request.pack())
    response = unpack_response(node.frames.recv(256))
    return response, node.result.read(response.length).decode(errors="replace")


def number_in(payload):
    return float((payload if isinstance(payload, str) else payload.decode(errors="replace"))[8:].split()[0])


def test_given_an_anytime_model_when_it_has_the_time_then_its_last_step_is_the_result(node, monkeypatch):
    seen = []
    monkeypatch.setattr(Anytime, "at", lambda number, x: seen.append(node.result.newest(5)))
    response, payload = ask(node, 5, 1.5)
    assert (response.outcome, response.step, number_in(payload)) == (Outcome.ON_TIME, 3, 9.0)
    assert [found and (found[0].step, number_in(found[1])) for found in seen] == [None, (1, 3.0), (2, 6.0)]
    assert all(found[0].inference_ns >= 0 <= found[0].postprocess_ns for found in seen[1:])
    assert seen[1][0].inference_ns < seen[2][0].inference_ns < response.inference_ns
    assert node.result.newest(6) is None


def test_given_a_frame_that_is_answered_when_a_step_is_done_then_the_run_ends_and_the_worker_takes_the_next(
    node, monkeypatch
):
    monkeypatch.setattr(Anytime, "at", lambda number, x: node.ring.answered(5) if number == 2 else None)
    response, _ = ask(node, 5, 1.5)
    assert (response.outcome, response.step) == (Outcome.PARTIAL, 2)
    assert ask(node, 6, 1.0)[0].outcome == Outcome.ON_TIME


@pytest.mark.parametrize(
    ("answered", "fields", "found"),
    [(9, {}, (Outcome.ON_TIME, 3, 9.0)), (4, {"last_step": 2}, (Outcome.PARTIAL, 2, 6.0))],
)
def test_given_a_run_when_its_last_step_is_done_then_that_is_the_answer_and_neither_stopped_nor_kept(
    node, answered, fields, found
):
    node.ring.answered(answered)
    response, payload = ask(node, 5, 1.5, leave_ns=0, **fields)
    assert (response.outcome, response.step, number_in(payload)) == found
    assert node.result.newest(5) is None


@pytest.mark.parametrize(
    ("wrong", "outcome", "said"),
    [
        (torch.full((1,), torch.nan), Outcome.INVALID, "NaN or Inf"),
        (torch.ones(2), Outcome.INVALID, "(2,)"),
        (RuntimeError("enough"), Outcome.ERROR, "RuntimeError: enough"),
    ],
)
def test_given_a_bad_step_then_it_is_the_outcome_and_the_step_before_is_kept(
    node, monkeypatch, wrong, outcome, said
):
    def at(number, x):
        if number == 2 and isinstance(wrong, Exception):
            raise wrong
        return wrong if number == 2 else None

    monkeypatch.setattr(Anytime, "at", at)
    response, payload = ask(node, 5, 1.5)
    assert response.outcome == outcome
    assert said in payload
    found, partial = node.result.newest(5)
    assert (found.step, number_in(partial)) == (1, 3.0)


def test_given_too_little_memory_in_a_step_when_run_then_the_lower_tier_begins_with_its_first(
    node, monkeypatch
):
    left = [1]

    def at(number, x):
        if number == 2 and left:
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Anytime, "at", at)
    response, payload = ask(node, 5, 1.5)
    assert (response.outcome, response.tier, response.step, number_in(payload)) == (
        Outcome.ON_TIME,
        1,
        3,
        45.0,
    )


def test_given_a_step_too_large_for_the_result_area_when_run_then_only_its_own_result_says_so(node):
    response, payload = ask(node, 5, 7.0 / 3)  # 14: a text of 2000 characters
    assert response.outcome == Outcome.ERROR
    assert f"at most max_frame_bytes, {RESULT_BYTES}, fit" in payload


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("Misshapen", r"tier full: step 2 of its example: .*\(2,\)"),
        ("Stepless", "tier full: steps gave nothing"),
    ],
)
def test_given_steps_that_cannot_be_published_when_calibrated_then_the_error_names_the_tier(
    open_node, adapter, said
):
    node = open_node(adapter)
    prepared = node.preparation.load()
    with pytest.raises(AdapterError, match=said):
        node.preparation.calibrate(prepared)


def test_given_a_package_or_an_engine_for_an_anytime_model_when_loaded_then_one_is_refused_and_one_explained(
    open_node,
):
    with pytest.raises(
        ConfigError, match="tier full: package x.pt2 cannot be: an anytime model runs in eager"
    ):
        open_node(packages=("x.pt2", "")).preparation.load()
    node = open_node(build=(BuildOptions("compile"),) * 2)
    ready = node.preparation.calibrate(node.preparation.load())
    assert [(tier.engine, tier.why) for tier in ready.tiers] == [
        ("eager", "an anytime model's steps are eager")
    ] * 2
    assert not ready.missing
