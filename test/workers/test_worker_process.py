"""One worker seen from the node; the process itself only sleeps, and the test speaks for it."""

import os
import socket
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.control import Progress, Remark, pack_readable, unpack_message
from torchperf_ros.workers.frame_ring import FrameRing
from torchperf_ros.workers.protocol import (
    MAX_CONTROL_BYTES,
    STACK_SIGNAL,
    Response,
    unpack_request,
)
from torchperf_ros.workers.result_area import ResultArea
from torchperf_ros.workers.worker_process import WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup
from torchperf_ros.workers.worker_state import WorkerState

MS = 1_000_000
RESULT_BYTES = 1024
SETUP = WorkerSetup("tested", "a:B", {"a": [1]}, ("full",), (BuildOptions(),), ("",), (0,), (-1,))


@pytest.fixture
def spawn():
    """Spawn workers: the node's end, and the far ends of their sockets and memory."""
    ring = FrameRing(1024)
    started = []
    workers = []

    class Server:
        """Starts a process that only sleeps."""

        def fork(self, descriptors, folder, meanwhile):
            frames, control, result, _, _ = (os.dup(descriptor) for descriptor in descriptors)
            started.append(
                SimpleNamespace(
                    frames=socket.socket(fileno=frames),
                    control=socket.socket(fileno=control),
                    result=result,
                )
            )
            self.process = subprocess.Popen(["sleep", "600"])
            return self.process.pid, os.pidfd_open(self.process.pid)

        def exit_code(self, pid):
            return self.process.wait()

    def make(kind=WorkerProcess):
        worker = kind(0, SETUP, [ring], RESULT_BYTES, Server())
        worker.ready_at_ns = 1
        worker.serve()
        workers.append(worker)
        return worker, started[-1]

    yield make
    for worker in workers:
        if worker.process.descriptor >= 0:
            worker.kill("the test is done")
            worker.close()
            assert worker.reap(5.0)
    for far in started:
        far.frames.close()
        far.control.close()
        os.close(far.result)
    ring.close()


def response(seq=7, length=6):
    return Response(0, 1, seq, length, 1, 2, 3, 4)


def test_given_a_setup_when_spawned_then_it_is_the_first_thing_that_the_worker_hears(spawn):
    _, far = spawn()
    assert unpack_message(far.control.recv(MAX_CONTROL_BYTES), WorkerSetup) == SETUP


def test_given_a_frame_when_handed_over_then_the_worker_is_busy_until_it_answers(spawn):
    near, far = spawn()
    assert (near.idle, near.state) == (True, "idle")
    assert near.run(1, 7, 64, 32, now_ns=5 * MS, observe=True)
    assert (near.idle, near.state, near.seq, near.busy_since_ns) == (False, "busy", 7, 5 * MS)
    request = unpack_request(far.frames.recv(256))
    assert (request.tier, request.seq, request.offset, request.length) == (1, 7, 64, 32)
    assert near.receive() is None
    ResultArea(far.result, writable=True).write(b"result and more")
    far.frames.send(response().pack())
    assert near.receive() == (response(), b"result")
    assert near.idle


def test_given_a_frame_handed_over_when_another_thread_looks_at_any_moment_then_it_is_not_busy_since_long_ago(
    spawn,
):
    """The pool's thread kills what is busy for too long; it may look between any two assignments."""
    seen = []

    class Watched(WorkerProcess):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if vars(self).get("seq") is not None and "busy_since_ns" in vars(self):
                seen.append(self.busy_since_ns)

    near, _ = spawn(Watched)
    near.run(0, 1, 0, 8, now_ns=10_000 * MS, observe=False)
    assert set(seen) == {10_000 * MS}


def test_given_a_worker_that_is_gone_when_a_frame_is_handed_over_then_it_says_so_and_is_not_used_again(
    spawn,
):
    near, far = spawn()
    far.frames.close()
    assert not near.run(0, 1, 0, 8, now_ns=0, observe=False)
    assert (near.usable, near.idle, near.seq, near.state) == (False, False, None, "dead")
    with pytest.raises(EOFError):
        near.receive()


def test_given_a_full_queue_when_told_to_observe_then_it_says_so_and_nobody_waits(spawn):
    near, _ = spawn()
    missed = sum(not near.observe(seq, 0, 8, now_ns=0) for seq in range(5000))
    assert 0 < missed < 5000
    assert near.usable


def breaks_the_protocol(near, why):
    with pytest.raises(EOFError):
        near.receive()
    return why in near.kill_reason and not near.usable


@pytest.mark.parametrize(
    ("given", "length", "why"),
    [
        ([], 6, "response to frame 7; it was given none"),
        ([8], 6, "response to frame 7; it was given 8"),
        ([], RESULT_BYTES + 1, "response of 1025 bytes in a result area of 1024"),
    ],
    ids=["that nobody asked for", "to another frame", "longer than its area"],
)
def test_given_a_response_that_cannot_be_when_received_then_the_worker_is_killed(spawn, given, length, why):
    near, far = spawn()
    for seq in given:
        near.run(0, seq, 0, 8, now_ns=0, observe=False)
    far.frames.send(response(seq=7, length=length).pack())
    assert breaks_the_protocol(near, why)


def test_given_a_frame_of_a_stream_when_it_or_another_streams_is_answered_then_only_its_own_answer_counts(
    spawn,
):
    near, far = spawn()
    near.run(0, 7, 0, 8, now_ns=0, observe=False, stream=2)
    assert unpack_request(far.frames.recv(256)).stream == 2
    far.frames.send(replace(response(seq=7), stream=2).pack())
    assert near.receive()[0].stream == 2
    assert near.idle
    near.run(0, 8, 0, 8, now_ns=0, observe=False, stream=2)
    far.frames.send(response(seq=8).pack())
    assert breaks_the_protocol(near, "response to frame 8; it was given 8 of stream 2")


def test_given_control_messages_when_received_then_they_come_in_order_and_the_end_is_none(spawn):
    near, far = spawn()
    assert near.receive_report() is None
    sent = [Progress("loading"), Remark("it is slow", alert=True)]
    for report in sent:
        far.control.send(pack_readable(report))
    assert [near.receive_report() for _ in sent] == sent
    assert near.control.fileno() in near.speaking
    far.control.close()
    assert near.receive_report() is None
    assert (
        near.control.fileno() not in near.speaking
    )  # or whoever waits for it would spin until the process is gone


def test_given_requests_that_are_not_handled_when_looked_at_then_it_is_stuck_for_as_long_as_nothing_moves(
    spawn,
):
    near, far = spawn()
    assert near.stuck_ms(1000 * MS) == 0.0
    near.observe(0, 0, 8, now_ns=2000 * MS)
    near.observe(1, 0, 8, now_ns=2500 * MS)
    assert near.stuck_ms(2700 * MS) == 700.0
    os.pwrite(far.result, (1).to_bytes(8, "little"), 0)  # the first is done
    assert near.stuck_ms(3000 * MS) == 0.0
    assert near.stuck_ms(3400 * MS) == 400.0
    os.pwrite(far.result, (2).to_bytes(8, "little"), 0)
    assert near.stuck_ms(9000 * MS) == 0.0
    near.run(0, 2, 0, 8, now_ns=20_000 * MS, observe=False)
    assert near.stuck_ms(20_100 * MS) == 100.0


def test_given_a_worker_when_it_is_killed_then_it_is_ending_at_the_latest_when_it_has_ended(spawn):
    near, _ = spawn()
    assert not near.is_ending
    near.kill("the test wants it")
    while not near.is_dead():
        pass
    assert near.is_ending


def test_given_a_worker_that_is_killed_when_asked_then_the_reason_has_signal_cause_and_its_last_words(
    spawn,
):
    near, _ = spawn()
    near.kill("it was in the way")
    near.kill("again")
    assert near.death_reason() == f"worker 0 (pid {near.pid}) ended by signal SIGKILL: it was in the way"
    assert not near.usable
    near.reported.error = "what it said itself"
    assert near.death_reason().endswith("it was in the way: what it said itself")


def test_given_a_worker_that_is_reaped_when_asked_for_its_stacks_then_what_has_its_descriptor_now_lives(
    spawn,
):
    near, _ = spawn()
    number = near.process.descriptor
    near.kill("the test wants it")
    near.close()
    assert near.reap(5.0)
    with subprocess.Popen(["sleep", "60"]) as other:
        descriptors = []
        while number not in descriptors:  # the lowest that is free
            descriptors.append(os.pidfd_open(other.pid))
        with pytest.raises(ProcessLookupError):
            near.ask_for_stacks()
        for descriptor in descriptors:
            os.close(descriptor)
        assert other.poll() is None
        other.kill()


def test_given_a_worker_when_asked_for_its_stacks_then_it_gets_the_signal_for_that(spawn):
    near, _ = spawn()
    near.ask_for_stacks()
    assert near.death_reason() == f"worker 0 (pid {near.pid}) ended by signal {STACK_SIGNAL.name}"


def test_given_a_worker_that_is_held_when_it_goes_on_then_the_time_in_between_is_not_its_own(spawn):
    near, _ = spawn()
    near.run(0, 1, 0, 8, now_ns=0, observe=False)
    near.hold()
    near.hold()
    assert (near.life.state, near.usable, near.idle) == (WorkerState.HELD, True, False)
    assert near.stuck_ms(5_000 * MS) == 0.0
    near.go_on(6_000 * MS)
    assert near.life.state is WorkerState.SERVING
    assert near.stuck_ms(6_100 * MS) == 100.0


def test_given_a_worker_that_has_ended_when_its_capture_goes_on_then_it_does_not_serve_again(spawn):
    near, _ = spawn()
    assert near.capture("profile: works", serves=False)
    assert (near.state, near.available, near.usable) == ("profile: works", False, True)
    near.withdraw()
    assert not near.capture("profile: records", serves=True)
    assert (near.state, near.usable) == ("dead", False)
    assert near.lost_ms(near.life.since_ns + 7 * MS) == 7.0
