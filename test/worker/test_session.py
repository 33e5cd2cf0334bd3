"""A worker's session, run in a thread of the test.

Sockets, ring and result area are real, the node is the test.
"""

import contextlib
import os
import socket
import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import AdapterError, BadInput, UnknownMessageType
from torchperf_ros.api.histories import HistoryBuffer
from torchperf_ros.api.messages import decode, encode, message_class
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.worker import preparation
from torchperf_ros.worker.preparation import Preparation
from torchperf_ros.worker.reports import EVERY_S, Reports
from torchperf_ros.worker.session import Session
from torchperf_ros.workers.control import (
    REPORTS,
    Description,
    LastWords,
    Progress,
    Ready,
    Remark,
    pack_message,
    unpack_message,
)
from torchperf_ros.workers.frame_ring import FrameRing, InputBytes
from torchperf_ros.workers.process_setup import LARGEST_KEPT_BYTES
from torchperf_ros.workers.protocol import (
    OBSERVE,
    RUN,
    SOON,
    Request,
    unpack_response,
)
from torchperf_ros.workers.result_area import ResultArea, make_result_area
from torchperf_ros.workers.worker_setup import WorkerSetup

NUMBER, TEXT = "std_msgs/msg/Float64", "std_msgs/msg/String"
SETUP = WorkerSetup("tested", "a:B", {}, ("full",), (BuildOptions(),), ("",), (0,), (-1,))
RESULT_BYTES = 1024  # the least that max_frame_bytes allows


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Doubling(Adapter):
    """Twice (tier 0) or ten times (tier 1) the number; says in words what is wrong with it."""

    inputs = {"number": NUMBER, "word": "std_msgs/String"}  # both forms of a name
    output = TEXT
    calls: list = []

    def __init__(self, options, device):
        self.options = options
        type(self).calls = []

    def build(self, tier):
        return Scale({"full": 2.0, "fast": 10.0}[tier]).train()

    def example_inputs(self, tier):
        return (torch.ones(1),)

    def observe(self, messages):
        self.calls.append(("observe", messages["number"].message.data))
        if messages["number"].message.data == -9.0:
            raise ValueError("cannot look at this")

    def preprocess(self, messages):
        value = messages["number"].message.data
        self.calls.append(("preprocess", value))
        if value == -1.0:
            raise BadInput("negative")
        if value == -2.0:
            raise ValueError("worse than negative")
        return ({-3.0: torch.ones(1) * torch.nan, -4.0: torch.ones(2)}.get(value, torch.tensor([value])),)

    def postprocess(self, outputs, messages):
        value = float(outputs[0])
        word = messages["word"].message.data if "word" in messages else ""
        received = messages["number"]
        if value == 14.0:
            word = "x" * 2000
        return message_class(TEXT)(data=f"{value} {word} {received.stamp_ns} {received.age_ms}")


class Wrapped(Doubling):
    """Its model gives its numbers in another form, which its postprocess may know how to open."""

    forms = {
        "a dict": (lambda y: {"logits": y}, lambda outputs: outputs),  # which postprocess does not know
        "a generator": (lambda y: (each for each in (y,)), next),
        "a function": (lambda y: lambda: y, lambda outputs: outputs()),
    }

    def build(self, tier):
        model, (wrap, _) = super().build(tier), self.forms[self.options["form"]]
        model.register_forward_hook(lambda module, inputs, output: wrap(output))
        return model

    def postprocess(self, outputs, messages):
        return super().postprocess(self.forms[self.options["form"]][1](outputs), messages)


class Hungry(Doubling):
    """The first tier has not enough memory for a number of 100 and more, the second for 1000 and more."""

    def build(self, tier):
        model, most = super().build(tier), {"full": 100.0, "fast": 1000.0}[tier]

        def refuse(module, inputs):
            if inputs[0] >= most:
                raise torch.OutOfMemoryError("CUDA out of memory")

        model.register_forward_pre_hook(refuse)
        return model


class Remembering(Doubling):
    """Keeps what it observes; the number 77 is overwritten while it looks."""

    overwrite = None

    def __init__(self, options, device):
        super().__init__(options, device)
        type(self).history = self._history = HistoryBuffer(4, (), max_gap_ns=1_000, tolerance_ns=0)

    def observe(self, messages):
        value = messages["number"].message.data
        self._history.append(torch.tensor(value, dtype=torch.float32), 0)
        if value == 77.0:
            type(self).overwrite()


class Sum(torch.nn.Module):
    """The sum of all that it was ever given, in a buffer and in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.seen = []

    def forward(self, x):
        self.total += x
        self.seen.append(x)
        return (self.total + sum(self.seen)) / 2


class Summing(Doubling):
    """Both tiers are one model, whose answers depend on what came before."""

    model = None

    def __init__(self, options, device):
        super().__init__(options, device)
        self.model = Sum()

    def build(self, tier):
        return self.model


class Untupled(Doubling):
    """Forgets the comma."""

    def preprocess(self, messages):
        return torch.ones(1, 1)


class Leaving(Doubling):
    def build(self, tier):
        raise SystemExit("weights not found")


class Unseeing(Doubling):
    observe = Adapter.observe


class Showing(Doubling):
    """Knows what its messages look like; the number 5 makes it fail."""

    def example_messages(self):
        number = message_class(NUMBER)(data=self.options.get("number", 1.0))
        return {"number": Received(number, 0, 0.0)}

    def postprocess(self, outputs, messages):
        self.calls.append(("postprocess", float(outputs[0])))
        return super().postprocess(outputs, messages)


class Undeclared(Doubling):
    output = "nowhere_msgs/msg/Nothing"


class Node:
    """The other end of a session."""

    def __init__(self, adapter="Doubling", every_s=EVERY_S, **setup):
        self.rings = [FrameRing(8192) for _ in setup.get("streams") or ("",)]
        self.ring = self.rings[0]
        self.result_fd = make_result_area(RESULT_BYTES, setup.get("batch", 1))
        self.result = ResultArea(self.result_fd, writable=False)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (self.frames, far_frames), (self.control, far_control) = pairs
        for end in (self.frames, self.control):
            end.settimeout(20.0)
        adapter = adapter if ":" in adapter else f"{__name__}:{adapter}"
        values = {
            "adapter": adapter,
            "options": {},
            "tiers": ("full", "fast"),
            "stage": "tested",
            "lower": (1, -1),
            "loaded": (0, 1),
            "build": (BuildOptions(),) * 2,
            "packages": ("",) * 2,
            **setup,
        }
        self.setup = WorkerSetup(**values)
        self.reports = Reports(far_control, every_s)
        self.preparation = Preparation(self.setup, self.reports)
        self.far_ends = (far_frames, far_control)
        self.thread = None

    def start(self):
        self.prepared = self.preparation.load()
        self.reports.say(self.preparation.calibrate(self.prepared))
        frames, control = self.far_ends
        given = self.prepared, self.reports, control, frames, self.result_fd
        session = Session(self.setup, *given, *(ring.fd for ring in self.rings))
        self.thread = threading.Thread(target=session.serve)
        self.thread.start()
        return self

    def told(self):
        """Every report so far."""
        self.control.settimeout(0.0)
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(unpack_message(self.control.recv(65_536), *REPORTS))
        return messages

    def write(self, seq, value, word=None, data=None, stream=0):
        number = bytes(encode(message_class(NUMBER)(data=value), NUMBER)) if data is None else data
        inputs = [InputBytes(0, 5, 1.5, number)]
        if word is not None:
            inputs.append(InputBytes(1, 0, 0.0, bytes(encode(message_class(TEXT)(data=word), TEXT))))
        return self.rings[stream].write(seq, inputs)

    def ask(self, seq, value=0.0, *, word=None, kind=RUN | OBSERVE, tier=0, place=None, data=None):
        """One request; its response and payload for RUN."""
        offset, length = self.write(seq, value, word, data) if place is None else place
        self.frames.send(Request(kind, tier, seq, offset, length).pack())
        if not kind & RUN:
            return None
        response = unpack_response(self.frames.recv(256))
        return response, self.result.read(response.length)

    def close(self):
        self.frames.close()
        if self.thread is not None:
            self.thread.join()
        for end in (self.control, *self.far_ends):
            end.close()
        self.result.close()
        os.close(self.result_fd)


@pytest.fixture
def make_node():
    nodes = []

    def make(*words, **values):
        nodes.append(Node(*words, **values))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def node(make_node):
    return make_node().start()


def text_of(payload):
    return decode(payload, TEXT).data


def test_given_a_session_when_prepared_then_it_says_hello_each_step_and_ready(node):
    hello, *progress, ready = node.told()
    assert hello == Description((("number", NUMBER), ("word", TEXT)), TEXT, True, "cpu")
    assert {type(report) for report in progress} == {Progress}
    said = [report.text for report in progress]
    assert [text for text in said if "loading" in text] == [
        "loading full (1 of 2)",
        "loading fast (2 of 2)",
    ]
    assert [text for text in said if "warming" in text] == [
        "warming up full (1 of 2)",
        "warming up fast (2 of 2)",
    ]
    assert isinstance(ready, Ready)
    assert len(ready.calibrations) == 2
    assert all(0 < each.median_ms <= each.p99_ms for each in ready.calibrations)


def test_given_frames_that_were_announced_and_never_came_when_one_comes_then_it_is_answered(node):
    for _ in range(3):
        node.frames.send(SOON)
    assert node.ask(1, 2.0)[0].outcome == Outcome.ON_TIME
    node.frames.send(SOON)
    assert node.ask(2, 2.0)[0].seq == 2


def test_given_messages_as_they_usually_come_when_prepared_then_each_tier_has_been_through_a_whole_frame(
    make_node,
):
    make_node("Showing").start()
    assert Showing.calls == [
        ("preprocess", 1.0),
        ("postprocess", 2.0),
        ("preprocess", 1.0),
        ("postprocess", 10.0),
    ]


def test_given_example_messages_that_fail_when_prepared_then_it_is_said_and_frames_are_served(make_node):
    node = make_node("Showing", options={"number": -2.0}).start()
    first, _ = [each.text for each in node.told() if isinstance(each, Remark)]
    assert first == "tier full: its first whole frame, of examples, failed: ValueError: worse than negative"
    node.control.settimeout(20.0)
    assert node.ask(0, 1.0)[0].outcome == Outcome.ON_TIME


def test_given_a_model_that_keeps_state_when_prepared_then_it_starts_as_it_was_built(make_node):
    node = make_node("Summing").start()
    assert [text_of(node.ask(seq, 1.0, tier=tier)[1])[:3] for seq, tier in enumerate((0, 0, 1))] == [
        "1.0",
        "2.0",
        "3.0",
    ]


def test_given_a_tensor_without_its_tuple_when_run_then_it_is_an_error_that_says_so(make_node):
    node = make_node("Untupled").start()
    for seq in range(2):
        response, payload = node.ask(seq, 1.0)
        assert response.outcome == Outcome.ERROR
        assert payload.startswith(
            b"preprocess gave a tensor float32 1x1 alone; it has to give a tuple of tensors"
        )


def test_given_a_model_that_generates_when_run_then_its_numbers_are_checked_and_reach_postprocess(
    make_node,
):
    node = make_node("Wrapped", options={"form": "a generator"}).start()
    assert [each for each in node.told() if isinstance(each, Remark)] == []
    node.control.settimeout(20.0)
    assert text_of(node.ask(0, 2.0)[1]).startswith("4.0")
    response, payload = node.ask(1, -3.0)
    assert response.outcome == Outcome.INVALID
    assert b"NaN" in payload


def test_given_outputs_that_nothing_can_look_into_when_prepared_then_each_tier_is_said_to_be_unchecked(
    make_node,
):
    node = make_node("Wrapped", options={"form": "a function"}).start()
    told = [each.text for each in node.told() if isinstance(each, Remark)]
    assert [text.split(":")[0] for text in told] == ["tier full", "tier fast"]
    assert "outputs are not checked for NaN and Inf: in a function no tensor" in told[0]


def test_given_an_adapter_that_calls_exit_when_loaded_then_it_is_an_error_with_the_place(make_node):
    with pytest.raises(
        AdapterError, match=r"build ends the program: SystemExit: weights not found \(test_session.py:"
    ):
        make_node("Leaving").preparation.load()


def test_given_an_adapter_then_whether_it_observes_is_said_and_an_unknown_type_is_refused_at_once(
    make_node,
):
    unseeing = make_node("Unseeing")
    unseeing.preparation.load()
    assert unseeing.told()[0].observes is False
    node = make_node("Undeclared")
    with pytest.raises(UnknownMessageType, match="nowhere_msgs"):
        node.preparation.load()
    assert node.told() == []


@pytest.mark.parametrize(("tier", "factor"), [(0, 2.0), (1, 10.0)])
def test_given_a_frame_when_run_then_the_result_is_of_its_tier_and_every_step_has_its_time(
    node, tier, factor
):
    response, payload = node.ask(3, 4.0, word="hi", tier=tier)
    assert (response.outcome, response.tier, response.seq) == (Outcome.ON_TIME, tier, 3)
    assert text_of(payload) == f"{4.0 * factor} hi 5 1.5"
    steps = (response.decode_ns, response.preprocess_ns, response.inference_ns, response.postprocess_ns)
    assert all(step >= 0 for step in steps)


def test_given_requests_when_served_then_each_step_is_called_as_asked_and_in_order(node):
    node.ask(0, 1.0)
    node.ask(1, 2.0, kind=OBSERVE)
    node.ask(2, 3.0, kind=RUN)
    assert Doubling.calls == [("observe", 1.0), ("preprocess", 1.0), ("observe", 2.0), ("preprocess", 3.0)]


@pytest.mark.parametrize(
    ("given", "outcome", "said"),
    [
        ({"value": -1.0}, Outcome.BAD_INPUT, "negative"),
        ({"value": -2.0}, Outcome.ERROR, "ValueError: worse than negative"),
        ({"value": -3.0}, Outcome.INVALID, "output 0 has 1 of 1 values that are NaN or Inf"),
        ({"value": -4.0}, Outcome.INVALID, "(2,)"),
        ({"value": -9.0}, Outcome.ERROR, "cannot look at this"),
        ({"value": 7.0}, Outcome.ERROR, f"at most max_frame_bytes, {RESULT_BYTES}, fit"),
        ({"data": b"\x00\x01\x00\x00\x01"}, Outcome.BAD_INPUT, "not a std_msgs/msg/Float64"),
    ],
)
def test_given_a_frame_that_fails_then_it_is_a_named_outcome_and_the_next_one_is_good(
    node, given, outcome, said
):
    response, payload = node.ask(0, **given)
    assert response.outcome == outcome
    assert said in payload.decode()
    response, payload = node.ask(1, 1.0)
    assert (response.outcome, text_of(payload)) == (Outcome.ON_TIME, "2.0  5 1.5")


def test_given_a_postprocess_that_takes_the_outputs_for_something_else_when_run_then_the_error_names_it(
    make_node,
):
    response, payload = make_node("Wrapped", options={"form": "a dict"}).start().ask(0, 1.0)
    assert response.outcome == Outcome.ERROR
    for words in ("KeyError: 0 (test_session.py:", "returns a dict with keys 'logits'", "Traceback"):
        assert words in payload.decode()


def test_given_a_record_that_was_overwritten_when_run_then_it_is_an_error_that_says_so(node):
    place = node.write(0, 1.0)
    for seq in range(1, 200):
        node.write(seq, 1.0, word="x" * 100)
    response, payload = node.ask(0, place=place)
    assert response.outcome == Outcome.ERROR
    assert payload == b"frame 0 was overwritten by newer ones before this worker was done with it"


def test_given_a_record_that_is_overwritten_while_it_is_observed_when_answered_then_the_history_forgets(
    make_node,
):
    node = make_node("Remembering").start()
    node.ask(0, 1.0)
    assert len(Remembering.history) == 1

    def overwrite():
        for seq in range(2, 400):
            node.write(seq, 0.0)

    Remembering.overwrite = overwrite
    response, payload = node.ask(1, 77.0)
    assert response.outcome == Outcome.ERROR
    assert b"frame 1 was overwritten" in payload
    assert len(Remembering.history) == 0


def test_given_frames_that_a_worker_did_not_observe_when_the_next_comes_then_its_history_has_a_gap(
    make_node,
):
    node = make_node("Remembering").start()
    node.ask(0, 1.0)
    offset, length = node.write(3, 2.0)
    node.frames.send(Request(RUN | OBSERVE, 0, 3, offset, length, missed=2).pack())
    assert unpack_response(node.frames.recv(256)).outcome == Outcome.ON_TIME
    rows, mask = Remembering.history.window()
    assert rows.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert mask.tolist() == [True, False, False, True]


def overwrite_during_a_run(node, monkeypatch, numbers, stream=0):
    run = node.prepared.tiers[0].run

    def run_slowly(inputs, leave_ns):
        for seq in numbers:
            node.write(seq, 1.0, word="x" * 100, stream=stream)
        return run(inputs, leave_ns)

    monkeypatch.setattr(node.prepared.tiers[0], "run", run_slowly)


def test_given_a_record_that_is_overwritten_while_it_runs_then_its_result_does_not_count(node, monkeypatch):
    overwrite_during_a_run(node, monkeypatch, range(1, 200))
    response, payload = node.ask(0, 1.0)
    assert response.outcome == Outcome.ERROR
    assert b"frame 0 was overwritten" in payload


def test_given_a_frame_that_cannot_be_observed_when_time_has_passed_then_it_is_told(make_node):
    node = make_node(every_s=0.0).start()
    node.told()
    node.ask(4, -9.0, kind=OBSERVE)
    node.ask(5, 1.0)
    (warning,) = [each for each in node.told() if isinstance(each, Remark)]
    assert "1 frames not observed, the last one frame 4: " in warning.text
    assert "cannot look at this" in warning.text


def test_given_a_node_that_is_gone_when_serving_then_the_session_ends(node):
    node.frames.close()
    node.thread.join(60.0)
    assert not node.thread.is_alive()


# -- memory, and what is told of the tiers


def test_given_a_worker_when_it_starts_then_it_keeps_freed_memory_before_it_builds_anything(
    monkeypatch, tmp_path
):
    did = []

    class Pretended:
        def __init__(self, *given):
            did.append("built")

        load = serve = lambda self: None
        calibrate = lambda self, prepared: Ready((), (), ())  # noqa: E731

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(preparation, "faulthandler", mock.Mock())
    monkeypatch.setattr(preparation, "keep_freed_memory", lambda *sizes: did.append(sizes))
    monkeypatch.setattr(preparation, "Preparation", Pretended)
    monkeypatch.setattr(preparation, "Session", Pretended)
    here, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frames = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        here.send(pack_message(replace(SETUP, kept_mib=3)))
        assert preparation.main(frames.detach(), control.detach(), -1, -1) == 0
    assert did == [(LARGEST_KEPT_BYTES, 3 << 20), "built", "built"]


def test_given_a_tier_without_the_memory_when_asked_then_the_next_lower_one_answers_or_the_frame_fails_alone(
    make_node, monkeypatch
):
    node = make_node("Hungry", every_s=0.0).start()
    for value, tier, answer in ((6.0, 0, "12.0"), (100.0, 1, "1000.0")):
        response, payload = node.ask(0, value)
        assert (response.outcome, response.tier) == (Outcome.ON_TIME, tier)
        assert text_of(payload).startswith(answer)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    response, payload = node.ask(1, 1000.0)
    assert response.outcome == Outcome.ERROR
    assert b"OutOfMemoryError: CUDA out of memory" in payload
    assert node.ask(2, 3.0)[0].outcome == Outcome.ON_TIME
    assert len(emptied) == 1
    node.control.settimeout(20.0)
    while getattr(report := unpack_message(node.control.recv(65_536), *REPORTS), "out_of_memory", 0) != 2:
        assert not isinstance(report, LastWords)
