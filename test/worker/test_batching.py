"""Frames of several streams in one run: which models may, and what becomes of each frame."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import message_class
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.worker.batching import run_together, sizes_up_to
from torchperf_ros.workers.calibration import Batching
from torchperf_ros.workers.control import Ready, Remark
from torchperf_ros.workers.protocol import OBSERVE, RUN, Request, unpack_response

# fixtures for these tests, too
from ..engines.conftest import fresh_compiler  # noqa: F401
from .test_session import TEXT, Doubling, make_node, overwrite_during_a_run, text_of  # noqa: F401

STREAMS = ("front", "left", "right", "rear")


@dataclasses.dataclass
class Found:
    boxes: Any
    unit: str


class Nested(torch.nn.Module):
    """Twice the number, in a nest. A number of 500 and more it does not take."""

    runs: list = []
    most = 64

    def forward(self, x):
        type(self).runs.append(tuple(x.shape))
        if len(x) > self.most:
            raise ValueError(f"more than {self.most}")
        if (x >= 500.0).any():
            raise ValueError("it is too much")
        return {"boxes": [Found(2.0 * x.float(), "m")], "scores": (x.float().mean(-1).numpy(),)}


class Camera(Doubling):
    """A number of 40 and more comes as an image that is wider."""

    def __init__(self, options, device):
        super().__init__(options, device)
        self.name = options["stream"]
        self.seen = []
        Nested.runs.clear()

    def build(self, tier):
        return Nested()

    def example_inputs(self, tier):
        return (torch.rand(1, 3),)

    def dynamic_dims(self):
        return {0: {0: (1, self.options.get("most", 8)), 1: (2, 9)}}

    def observe(self, messages):
        self.seen.append(messages["number"].message.data)

    def preprocess(self, messages):
        value = messages["number"].message.data
        if value == -1.0:
            raise BadInput("negative")
        kind = torch.float64 if value == 30.0 else torch.float32
        return (torch.full((1, 4 if 40.0 <= value < 500.0 else 3), value, dtype=kind),)

    def postprocess(self, outputs, messages):
        (found,), (scores,) = outputs["boxes"], outputs["scores"]
        assert found.unit == "m"
        assert found.boxes.shape[0] == len(scores) == 1
        value = float(found.boxes[0, 0])
        if value == 14.0:
            raise RuntimeError("cannot put this into a message")
        return message_class(TEXT)(data=f"{self.name} {value} {scores[0]}")


class Model(torch.nn.Module):
    calls = 0  # of every model: state where nothing looks for it

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x, *_):
        Model.calls += 1
        return self.act(self, x)


MIXING = {
    "mean over dimension 0": (lambda _, x: x - x.mean(0, keepdim=True), "depend on the others in its run"),
    "batch norm in training mode": (
        lambda _, x: torch.nn.functional.batch_norm(x[:, None], None, None, training=True),
        "depend on the others in its run",
    ),
    "state that is hidden": (lambda _, x: x + Model.calls, "depend on the others in its run"),
    "one output for all": (lambda _, x: x.sum(), "its dimension 0 has to be 2"),
    "a row too many": (lambda _, x: torch.cat([x, x[:1]]), "its dimension 0 has to be 2"),
    "takes one frame": (lambda _, x: x.reshape(3), "two frames in one run: RuntimeError"),
}
"""By name what a model does with [b, 3], and what the refusal says."""


class Mixing(Camera):
    def build(self, tier):
        return Model(MIXING[self.options["does"]][0])

    def postprocess(self, outputs, messages):
        return message_class(TEXT)(data=f"{self.name} {outputs.shape}")


class Plain(Camera):
    def build(self, tier):
        model = torch.nn.Linear(3, 2)
        for weights in model.parameters():  # whose sums are exact in any order
            torch.nn.init.constant_(weights, 0.5)
        return model

    def dynamic_dims(self):
        return {0: {0: (1, 8)}}

    def postprocess(self, outputs, messages):
        return message_class(TEXT)(data=f"{self.name} {outputs.tolist()}")


class Fixed(Camera):
    def dynamic_dims(self):
        return {0: {1: (2, 9)}}


class Uneven(Camera):
    def build(self, tier):
        return Model(lambda _, x: x)

    def example_inputs(self, tier):
        return torch.rand(1, 3), torch.rand(5, 3)


class Steps(Nested):
    def steps(self, x):
        yield self.forward(x)


class SteppingAdapter(Camera):
    anytime = True

    def build(self, tier):
        return Steps()


@pytest.fixture
def open_node(make_node):  # noqa: F811 - the fixture
    def open_it(adapter="Camera", batch=4, **setup):
        setup = {
            "streams": STREAMS,
            "batch": batch,
            "tiers": ("full",),
            "lower": (-1,),
            "loaded": (0,),
            **setup,
        }
        setup = {"build": (BuildOptions(),), "packages": ("",), **setup}
        return make_node(f"{__name__}:{adapter}", **setup)

    return open_it


def batching(node):
    """What the worker has found before its first frame, and its alerts: one, once, if it found less."""
    node.prepared = node.preparation.load()
    found = node.preparation.calibrate(node.prepared)
    assert isinstance(found, Ready)
    said = [each for each in node.told() if isinstance(each, Remark)]
    why = found.batching.refusal
    assert [each.text.endswith(f"together than batch allows: {why}") for each in said] == [True] * bool(why)
    return found, [each.text for each in said if each.alert]


def ask_together(node, values, seq=7):
    """One frame of each stream in one packet; by stream the outcome and the words."""
    Nested.runs.clear()
    before = node.result.handled
    requests = [
        Request(
            RUN | OBSERVE, 0, seq, *node.write(seq, value, stream=stream), leave_ns=1 << 62, stream=stream
        )
        for stream, value in values.items()
    ]
    node.frames.send(b"".join(request.pack() for request in requests))
    # read late: each has a place of its own
    responses = [unpack_response(node.frames.recv(256)) for _ in requests]
    found = {}
    for response in responses:
        assert response.seq == seq
        payload = node.result.read(response.length, response.place)
        good = response.outcome == Outcome.ON_TIME
        found[response.stream] = (
            Outcome(response.outcome),
            text_of(payload) if good else payload.decode(),
            response,
        )
    assert node.result.handled == before + len(requests)
    # Each frame that a run took says how many ran with it, as its record does then.
    ran = [f"{rows}x{columns}".encode() for rows, columns in Nested.runs for _ in range(rows)]
    assert not ran or sorted(r.shapes for *_, r in found.values() if r.shapes) == sorted(ran)
    return found


def words(found):
    return {stream: text for stream, (_, text, _) in found.items()}


@pytest.fixture
def node(open_node):
    return open_node().start()


def test_given_frames_of_several_streams_when_run_together_then_each_gets_its_own_share_of_one_run(node):
    found = ask_together(node, {2: 1.0, 0: 2.0, 3: 3.0})
    assert words(found) == {2: "right 2.0 1.0", 0: "front 4.0 2.0", 3: "rear 6.0 3.0"}
    assert Nested.runs == [(3, 3)]
    assert [adapter.seen for adapter in node.prepared.adapters] == [[2.0], [], [1.0], [3.0]]
    responses = [response for *_, response in found.values()]
    assert len({response.inference_ns for response in responses}) == 1
    assert all(min(r.decode_ns, r.preprocess_ns, r.inference_ns, r.postprocess_ns) >= 0 for r in responses)
    assert {response.shapes for response in responses} == {b"3x3"}


def test_given_frames_of_which_some_fail_when_run_together_then_the_others_are_answered(node):
    found = ask_together(node, {0: -1.0, 1: 7.0, 2: float("nan"), 3: 4.0})
    assert [found[stream][0] for stream in range(4)] == [
        Outcome.BAD_INPUT,
        Outcome.ERROR,
        Outcome.INVALID,
        Outcome.ON_TIME,
    ]
    assert found[0][1] == "negative"
    assert "cannot put this into a message" in found[1][1]
    assert found[3][1] == "rear 8.0 4.0"
    assert Nested.runs == [(3, 3)]


def test_given_frames_that_ran_together_when_one_runs_alone_then_its_outputs_are_checked(node):
    good, nan = {0: 1.0, 1: 2.0}, float("nan")
    for values, bad in ((good, {}), ({0: nan}, {0}), (good, {}), ({0: 1.0, 1: nan, 2: 3.0}, {1})):
        found = ask_together(node, values)
        assert {stream for stream, (outcome, *_) in found.items() if outcome == Outcome.INVALID} == {*bad}
    assert found[1][1].startswith("output 0 has 3 of 3 values that are NaN or Inf")


@torch.inference_mode()
def test_given_inputs_when_run_together_then_they_go_to_the_device_one_by_one_and_outputs_are_checked_at_once(
    node, monkeypatch
):
    tier, brought = node.prepared.tiers[0], []
    to_device = tier.device.to_device
    monkeypatch.setattr(tier.device, "to_device", lambda given: brought.append(given) or to_device(given))
    for value, good in ((1.0, True), (float("nan"), False), (2.0, True)):
        brought.clear()
        run_together(tier, [(torch.ones(1, 3),), (torch.full((2, 3), value),)])
        assert [[len(each) for each in given] for given in brought] == [[1, 2], [3]]
        assert tier.is_finite is good


def test_given_inputs_of_other_sizes_and_types_when_asked_together_then_they_run_apart_in_the_order_given(
    node,
):
    found = ask_together(node, {0: 40.0, 1: 1.0, 2: 41.0, 3: 30.0})
    assert Nested.runs == [(2, 4), (1, 3), (1, 3)]
    assert words(found) == {
        0: "front 80.0 40.0",
        1: "left 2.0 1.0",
        2: "right 82.0 41.0",
        3: "rear 60.0 30.0",
    }


def test_given_a_common_run_that_fails_when_asked_together_then_that_is_the_outcome_of_each_and_no_other(
    node,
):
    found = ask_together(node, {0: 1.0, 1: 600.0, 2: 40.0})
    assert [found[stream][0] for stream in range(3)] == [Outcome.ERROR, Outcome.ERROR, Outcome.ON_TIME]
    assert "it is too much" in found[0][1]
    assert words(ask_together(node, {0: 1.0, 2: 2.0}, seq=8)) == {0: "front 2.0 1.0", 2: "right 4.0 2.0"}


def test_given_a_frame_that_is_overwritten_when_run_together_then_only_that_one_fails(node, monkeypatch):
    overwrite_during_a_run(node, monkeypatch, range(8, 200), stream=1)
    found = ask_together(node, {0: 1.0, 1: 2.0})
    assert "frame 7 was overwritten" in found[1][1]
    assert found[0][1] == "front 2.0 1.0"


def test_given_a_model_that_takes_batches_when_started_then_it_says_how_many_and_how_long_they_take(
    open_node,
):
    found, alerts = batching(open_node(batch=6))
    assert (found.batching.most, found.batching.refusal, alerts) == (6, "", [])
    ((*pairs,),) = found.batching.times_ms
    assert [size for size, _ in pairs] == [1, 2, 4, 6]
    assert all(ms > 0.0 for _, ms in pairs)


def test_given_an_engine_for_ranges_of_sizes_when_frames_run_together_then_it_runs_them_as_prepared(
    open_node,
    monkeypatch,
    fresh_compiler,  # noqa: F811 - the fixture
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    node = open_node("Plain", build=(BuildOptions("compile"),)).start()
    tier = node.prepared.tiers[0]
    alone = {stream: words(ask_together(node, {stream: 2.0 * stream}))[stream] for stream in range(3)}
    before = tier.report()
    assert words(ask_together(node, {stream: 2.0 * stream for stream in range(3)})) == alone
    facts = tier.report()
    assert (facts.engine, facts.recompiles, facts.engine_errors) == ("compile", 0, 0)
    assert (facts.hits - before.hits, facts.misses) == (1, 0)


ONE_FRAME = {
    **{does: ("Mixing", {"does": does}, why) for does, (_, why) in MIXING.items()},
    "fixed": ("Fixed", {}, "dynamic_dims() lets dimension 0 of input 0 be 1 at most; one frame has 1"),
    "one at most": ("Camera", {"most": 1}, "be 1 at most"),
    "uneven": ("Uneven", {}, "dimension 0 of the example inputs differs"),
    "anytime": ("SteppingAdapter", {}, "the steps of an anytime model"),
}
"""By why a model takes one frame only: its adapter, its options, and words of the refusal."""


@pytest.mark.parametrize("case", ONE_FRAME)
def test_given_a_model_for_one_frame_when_started_then_batches_are_refused_and_it_serves(open_node, case):
    adapter, options, why = ONE_FRAME[case]
    found, alerts = batching(open_node(adapter, options=options))
    batch, said = found.batching, "fewer frames of several streams run together than batch allows"
    assert (batch.most, why in batch.refusal) == (1, True), batch.refusal
    assert batch.refusal.startswith("tier full takes 1 at most: ")
    # only what is found by running it is an alert: the rest the adapter declares
    assert alerts == ([f"{said}: {batch.refusal}"] if case in MIXING else [])
    assert case in MIXING or batch.times_ms == ((),)
    with pytest.raises(
        ConfigError, match=r"tested.batch asks for 4 .* has to be 1, or auto: tier full takes 1"
    ):
        batching(open_node(adapter, options=options, batch_strict=True))


@pytest.mark.parametrize("strict", [True, False])
def test_given_a_batch_above_what_the_model_takes_when_started_then_parameter_value_and_the_most_are_named(
    open_node, strict
):
    node = open_node(options={"most": 3}, batch_strict=strict)
    why = "tier full takes 3 at most: dynamic_dims() lets dimension 0 of input 0 be 3"
    if strict:
        asks = "parameter tested.batch asks for 4 frames in one run (at most one of each stream)"
        words = f"{asks}; it has to be 1 to 3, or auto: {why}"
        with pytest.raises(ConfigError, match=re.escape(words)):
            batching(node)
        return
    found, alerts = batching(node)
    assert (found.batching.most, alerts) == (3, [])
    assert found.batching.refusal.startswith(why)
    assert [size for size, _ in found.batching.times_ms[0]] == [1, 2, 3]


def test_given_a_size_that_fails_when_started_then_fewer_frames_run_together_and_an_alert_says_why(
    open_node, monkeypatch
):
    monkeypatch.setattr(Nested, "most", 3)
    found, (alert,) = batching(open_node(batch=4))
    why = "a run of 4 frames failed: ValueError: more than 3"
    assert f"tier full takes 2 at most: {why}" in alert
    assert (found.batching.most, [size for size, _ in found.batching.times_ms[0]]) == (2, [1, 2])
    assert why in found.batching.refusal


def test_given_what_an_earlier_worker_found_when_another_starts_then_each_size_runs_once_and_nothing_is_said(
    open_node,
):
    known = Batching(3, "", (((1, 0.5), (2, 0.6), (3, 0.7)),))
    found, alerts = batching(open_node(batch=4, batching=known, batch_strict=True))
    assert (found.batching, alerts) == (known, [])
    assert [Nested.runs.count((size, 3)) for size in (2, 3)] == [1, 1]


@pytest.mark.parametrize("most", range(1, 20))
def test_given_any_most_when_sizes_are_measured_then_they_double_up_to_it(most):
    sizes = list(sizes_up_to(most))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(small < large <= 2 * small for small, large in zip(sizes, sizes[1:], strict=False))
