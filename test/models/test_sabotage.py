"""The sabotaging adapter: schedules, the journal, and real signals in child processes."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time

import pytest
import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.clock import VirtualClock
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.models.sabotage import (
    FaultDraw,
    FaultSchedule,
    Poisonable,
    Sabotage,
    SabotagedAdapter,
    hold_gil,
)

CPU = torch.device("cpu")
STAMP_NS = 1_700_000_000_123_456_789
MESSAGES = {"image": Received(None, STAMP_NS, 1.0), "odom": Received(None, 5, 1.0)}


class Double(torch.nn.Module):
    def forward(self, x):
        return {"double": x * 2, "index": (x.argmax(), [x])}


class Doubler(Adapter):
    """An adapter whose model doubles its input."""

    inputs = {"image": "sensor_msgs/msg/Image", "odom": "nav_msgs/msg/Odometry"}
    output = "std_msgs/msg/Float64"

    def __init__(self, options, device):
        self.options = options

    def build(self, tier):
        return Double().eval()

    def example_inputs(self, tier):
        return (torch.ones(3),)

    def dynamic_dims(self):
        return {0: {0: (2, 9)}}

    def preprocess(self, messages):
        return (torch.arange(3.0),)

    def postprocess(self, outputs, messages):
        return outputs


def options(folder, **more):
    """Options around `Doubler` with its journal in a folder."""
    return {"adapter": f"{__name__}:Doubler", "journal": str(folder / "journal"), **more}


def lines(folder):
    """What the journal holds."""
    path = folder / "journal"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def luck(folder, clock, faults, seed=0, gate=None):
    """One more worker of the stage whose journal is in the folder."""
    read = {kind: FaultSchedule.read(kind, value) for kind, value in faults.items()}
    return FaultDraw(read, folder / "journal", seed, clock, gate)


def test_given_a_gate_when_faults_are_due_then_one_at_a_time_begins_and_a_frame_s_own_hits_every_worker(
    tmp_path,
):
    clock, gate = VirtualClock(), tmp_path / "gate"
    faults = {"raise": {"every_s": 100, "after_s": 1}, "poison_hang": {"every_s": 100, "after_s": 1}}
    one, two = (luck(tmp_path, clock, faults, gate=gate) for _ in range(2))
    clock.advance_ms(5_000)
    assert (one.draw(1), two.draw(1)) == (None, None)
    gate.touch()
    assert (one.draw(2), two.draw(2), one.draw(3)) == ("raise", None, None)
    assert not gate.exists()
    gate.touch()
    assert (one.draw(4), two.draw(4), two.draw(5)) == ("poison_hang", "poison_hang", None)
    assert not gate.exists()


def test_given_a_period_when_it_has_passed_then_one_worker_of_the_stage_gets_the_fault_once(tmp_path):
    clock = VirtualClock()
    one = luck(tmp_path, clock, {"hang": {"every_s": 10}})
    clock.advance_ms(4_000)
    two = luck(tmp_path, clock, {"hang": {"every_s": 10}})  # starts later, keeps the first one's schedule
    assert (one.draw(), two.draw()) == (None, None)
    clock.advance_ms(6_000)
    assert (two.draw(), one.draw(), two.draw()) == ("hang", None, None)
    clock.advance_ms(10_000)
    assert (one.draw(), two.draw()) == ("hang", None)


def test_given_a_seed_when_two_workers_run_the_same_frames_then_their_luck_differs_and_repeats(tmp_path):
    def draws(folder):
        folder.mkdir()
        workers = [luck(folder, VirtualClock(), {"stall": 0.1}) for _ in range(2)]
        return [[worker.draw() for _ in range(200)] for worker in workers]

    first, again = draws(tmp_path / "a"), draws(tmp_path / "b")
    assert first == again
    assert first[0] != first[1]
    assert 5 < first[0].count("stall") < 50


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"faults": {"melt": 0.1}}, "melt"),
        ({"faults": {"stall": 1.5}}, "faults.stall: option 'probability' is 1.5"),
        ({"faults": {"stall": {"each_s": 1}}}, "each_s"),
        ({"stal_ms": 3}, "stal_ms"),
    ],
)
def test_given_a_wrong_option_when_built_then_the_error_names_it(tmp_path, wrong, named):
    with pytest.raises(ConfigError, match=named):
        SabotagedAdapter(options(tmp_path, **wrong), CPU)


def test_given_no_faults_when_a_frame_runs_then_the_inner_adapter_is_all_there_is(tmp_path):
    adapter = SabotagedAdapter(options(tmp_path, options={"size": 3}), CPU)
    adapter.observe(MESSAGES)
    (x,) = adapter.preprocess(MESSAGES)
    assert (adapter.inputs, adapter.output) == (Doubler.inputs, Doubler.output)
    assert adapter.postprocess(adapter.build("full")(x), MESSAGES)["double"].tolist() == [0, 2, 4]
    assert adapter.dynamic_dims() == {0: {0: (2, 9)}}
    for name in ("scene", "score", "score_messages", "example_messages"):
        assert getattr(adapter, name).__self__ is adapter.inner, "also where a subclass has its own"
    assert lines(tmp_path) == []


def test_given_a_raise_when_a_frame_runs_then_it_raises_and_the_journal_has_the_stamp(tmp_path):
    adapter = SabotagedAdapter(options(tmp_path, faults={"raise": 1.0}), CPU)
    with pytest.raises(Sabotage):
        adapter.preprocess(MESSAGES)
    (line,) = lines(tmp_path)
    assert (line["kind"], line["stamp_ns"]) == ("raise", STAMP_NS)
    assert line["pid"] > 0
    assert line["monotonic_ns"] > 0


def test_given_nan_when_a_frame_runs_then_every_float_output_is_nan_and_the_next_frame_is_well(tmp_path):
    adapter = SabotagedAdapter(options(tmp_path, faults={"nan": {"every_s": 1e9, "after_s": 0}}), CPU)
    model = adapter.build("full")
    sick, well = (model(*adapter.preprocess(MESSAGES)) for _ in range(2))
    assert torch.isnan(sick["double"]).all()
    assert torch.isnan(sick["index"][1][0]).all()
    assert sick["index"][0].item() == 2
    assert well["double"].tolist() == [0, 2, 4]


def test_given_nan_and_an_anytime_model_when_a_frame_runs_then_every_step_is_nan_or_none(tmp_path):
    inner = {"adapter": "torchperf_ros.models.planner:PlannerAdapter", "options": {"anytime": True}}
    for faults in ({"nan": 1.0}, {}):
        adapter = SabotagedAdapter({**options(tmp_path, faults=faults), **inner}, CPU)
        assert adapter.anytime
        inputs = list(adapter.example_inputs("fast"))
        if faults:
            inputs[-1] = torch.tensor([float("nan")])
        steps = list(adapter.steps(adapter.build("fast"), tuple(inputs)))
        assert [bool(outputs.isnan().all()) for outputs in steps] == [bool(faults)] * 3


def test_given_a_poisonable_model_when_exported_with_a_dynamic_batch_then_nan_still_comes_out():
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return x + y, (x > y).sum()

    batch = torch.export.Dim("batch", min=2, max=8)
    x, zero, nan = torch.ones(3, 4), torch.zeros(1), torch.tensor([float("nan")])
    program = torch.export.export(
        Poisonable(Sum()), (x, x, zero), dynamic_shapes=({0: batch}, {0: batch}, None)
    )
    module = program.module()
    wide = torch.ones(5, 4)
    assert module(wide, wide, zero)[0].eq(2).all()
    assert module(wide, wide, nan)[0].isnan().all()
    assert module(wide, wide, nan)[1].item() == 0


def test_given_the_gil_held_when_another_thread_wants_to_run_then_it_cannot():
    turns, done = [0], threading.Event()

    def other():
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    def turns_of_the_other_during(act):
        before = turns[0]
        act()
        return turns[0] - before

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that no switch falls between the readings and the call
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert turns_of_the_other_during(lambda: hold_gil(50_000)) == 0
        looks = (turns_of_the_other_during(lambda: time.sleep(0.05)) for _ in range(200))
        assert any(looks)  # within 10 s, if others take the processors
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval_s)


@contextlib.contextmanager
def child(folder, kind):
    """The id of a process that runs one frame with a fault."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        with contextlib.suppress(BaseException):
            SabotagedAdapter(options(folder, faults={kind: 1.0}), CPU).preprocess(MESSAGES)
        os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has been waited for
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("kind", "number"), [("sigkill", signal.SIGKILL), ("sigsegv", signal.SIGSEGV)])
def test_given_a_deadly_fault_then_the_process_dies_by_it_after_writing_it_down(tmp_path, kind, number):
    with child(tmp_path, kind) as pid:
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == number
    assert [(line["kind"], line["pid"]) for line in lines(tmp_path)] == [(kind, pid)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_given_a_hang_when_a_frame_runs_then_the_worker_never_returns_and_has_written_it_down(tmp_path):
    with child(tmp_path, "hang") as pid:
        while not lines(tmp_path):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.2)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)


def test_given_a_scheduled_poison_when_its_frame_is_run_again_then_every_worker_gets_it(tmp_path):
    clock = VirtualClock()
    one, two = (luck(tmp_path, clock, {"poison_hang": {"every_s": 10, "after_s": 2}}) for _ in range(2))
    assert (one.draw(1), two.draw(1)) == (None, None)
    clock.advance_ms(2_000)
    assert (one.draw(2), two.draw(3), two.draw(2), one.draw(2), one.draw(4)) == (
        "poison_hang",
        None,
        "poison_hang",
        "poison_hang",
        None,
    )
