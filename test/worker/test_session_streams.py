"""A worker that serves several streams: an adapter, a ring and histories for each, one model."""

from typing import ClassVar

import pytest
import torch

from torchperf_ros.api.errors import AdapterError, ConfigError
from torchperf_ros.api.histories import HistoryBuffer
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.workers.protocol import OBSERVE, RUN, Request, unpack_response

# a fixture for these tests, too
from .test_session import Doubling, Scale, Summing, make_node, text_of  # noqa: F401

CAMERAS = ("front", "left", "rear")


class Camera(Doubling):
    """Says which stream it is of, and keeps what it has observed."""

    made: ClassVar[list] = []

    def __init__(self, options, device):
        super().__init__(options, device)
        self.name = options["stream"]
        self.history = None
        self.made.append(self)

    def build(self, tier):
        assert self.name == "front"
        return Scale({"full": 2.0, "fast": 10.0}[tier])

    def observe(self, messages):
        if self.history is None:  # as late as an adapter may make it
            self.history = HistoryBuffer(4, (), max_gap_ns=1_000, tolerance_ns=0)
        self.history.append(torch.tensor(messages["number"].message.data, dtype=torch.float32), 0)

    def postprocess(self, outputs, messages):
        message = super().postprocess(outputs, messages)
        message.data = f"{self.name} {message.data}"
        return message


class Choosy(Doubling):
    def __init__(self, options, device):
        super().__init__(options, device)
        if unknown := options.keys() - {"speed"}:
            raise ConfigError(f"unknown options: {unknown}")


class Broken(Doubling):
    def __init__(self, options, device):
        raise ConfigError("option speed: it has to be there")


class Unlike(Doubling):
    def __init__(self, options, device):
        super().__init__(options, device)
        if options["stream"] == "left":
            self.inputs = {"number": "std_msgs/msg/Float32", "word": "std_msgs/msg/String"}


class Drawing(Doubling):
    """Adds what it draws."""

    def preprocess(self, messages):
        return (torch.rand(1),)


class RefiningScale(Scale):
    def steps(self, x):
        yield from (super().forward(x), super().forward(x))


class AnytimeCamera(Camera):
    anytime = True

    def build(self, tier):
        return RefiningScale(2.0)


@pytest.fixture
def open_node(make_node):  # noqa: F811 - the fixture
    Camera.made.clear()
    return lambda adapter="Camera", streams=CAMERAS, **setup: make_node(
        f"{__name__}:{adapter}", streams=streams, **setup
    )


def ask(node, stream, seq, value, kind=RUN | OBSERVE, **fields):
    request = Request(kind, 0, seq, *node.write(seq, value, stream=stream), stream=stream, **fields)
    node.frames.send(request.pack())
    if not kind & RUN:
        return None
    response = unpack_response(node.frames.recv(256))
    assert (response.stream, response.seq) == (stream, seq)
    payload = node.result.read(response.length)
    if response.outcome != Outcome.ON_TIME:
        return response.outcome, payload.decode()
    return text_of(payload)


def test_given_streams_when_frames_come_then_each_is_answered_by_its_own_adapter_and_one_model(open_node):
    node = open_node().start()
    words = [ask(node, stream, 7, 1.0 + stream).split()[:2] for stream in (2, 0, 1, 2)]
    assert words == [["rear", "6.0"], ["front", "2.0"], ["left", "4.0"], ["rear", "6.0"]]
    assert [adapter.name for adapter in Camera.made] == list(CAMERAS)


def test_given_streams_when_one_misses_frames_or_forgets_then_the_histories_of_the_others_stay(open_node):
    node = open_node().start()
    for stream in range(3):
        ask(node, stream, 0, 1.0 + stream, kind=OBSERVE)
    ask(node, 1, 3, 9.0, missed=2)
    rows = [adapter.history.window()[0].tolist() for adapter in Camera.made]
    assert rows == [[0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 3.0]]
    place = node.write(5, 1.0, stream=2)

    def overwrite(*_):
        for seq in range(6, 60):
            node.write(seq, 1.0, word="x" * 200, stream=2)

    Camera.made[2].history.append = overwrite
    node.frames.send(Request(RUN | OBSERVE, 0, 5, *place, stream=2).pack())
    assert unpack_response(node.frames.recv(256)).outcome == Outcome.ERROR
    assert [len(adapter.history) for adapter in Camera.made] == [1, 2, 0]


def test_given_a_frame_of_a_stream_that_fails_when_asked_then_the_other_streams_do_not_notice(open_node):
    node = open_node().start()
    assert ask(node, 0, 1, -1.0) == (Outcome.BAD_INPUT, "negative")
    assert ask(node, 1, 1, -2.0)[0] == Outcome.ERROR
    assert ask(node, 2, 1, 3.0).startswith("rear 6.0")


@pytest.mark.parametrize(
    ("adapter", "options", "error", "words"),
    [
        (
            "Choosy",
            {"speed": 1},
            AdapterError,
            "refuses the option 'stream', which names the stream that it is of, here 'front'",
        ),
        ("Broken", {}, ConfigError, "option speed: it has to be there"),
        ("Unlike", {}, AdapterError, "has the inputs .*Float32.* for stream 'left' and .*Float64"),
    ],
)
def test_given_adapters_that_refuse_something_or_differ_when_loaded_then_the_error_names_it(
    open_node, adapter, options, error, words
):
    with pytest.raises(error, match=words):
        open_node(adapter, options=options).preparation.load()


def test_given_a_model_that_keeps_state_when_it_would_serve_streams_then_it_is_refused(open_node):
    node = open_node("Summing")
    with pytest.raises(
        AdapterError, match=r"tier full: .* state between calls \(total, seen\), which the streams"
    ):
        node.preparation.calibrate(node.preparation.load())
    open_node("Summing", streams=("front",)).start()


def test_given_a_seed_when_frames_come_in_any_order_then_draws_follow_from_stream_and_frame(open_node):
    drawn = []
    for order in ([(0, 1), (1, 1), (0, 2)], [(0, 2), (1, 1), (0, 1)]):
        node = open_node("Drawing", streams=("front", "left"), seed=5).start()
        drawn.append({(stream, seq): ask(node, stream, seq, 1.0) for stream, seq in order})
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) == 3


def test_given_one_stream_when_seeded_then_draws_are_those_of_a_stage_without_streams(open_node):
    drawn = []
    for streams in ((), ("front",)):
        node = open_node("Drawing", streams=streams, seed=5).start()
        drawn.append(ask(node, 0, 3, 1.0))
    assert drawn[0] == drawn[1]


def test_given_an_anytime_model_when_a_stream_is_answered_then_only_its_own_run_ends(open_node):
    node = open_node("AnytimeCamera").start()
    node.rings[0].answered(9)
    assert ask(node, 1, 5, 2.0, leave_ns=1 << 62).startswith("left 4.0")
    assert node.result.newest(5, 1)[0].step == 2
    assert node.result.newest(5, 0) is None
    assert ask(node, 0, 5, 2.0, leave_ns=1 << 62)[0] == Outcome.PARTIAL
