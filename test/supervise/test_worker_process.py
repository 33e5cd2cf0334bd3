"""One worker seen from the node, without a process where none is needed."""

import socket
from types import SimpleNamespace

import pytest

from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.supervise.protocol import RESULT_OFFSET, Response, pack_control, unpack_request
from torchperf_ros.supervise.worker_process import WorkerProcess

MS = 1_000_000


def worker(kind=WorkerProcess):
    """A worker whose process the test plays itself."""
    made = kind.__new__(kind)
    made.number, made.seq, made.busy_since_ns, made.ready_at_ns, made.usable = 0, None, 0, 1, True
    made._sent, made._handled, made._handled_at_last_look = 0, [0], 0
    made.kill = lambda reason: setattr(made, "usable", False)
    made.missed_observations, made.kill_reason = 0, ""
    made.frames, far_frames = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.control, far_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.frames.setblocking(False)
    made.control.setblocking(False)
    made.speaking = {made.control.fileno()}
    made._result = bytes(RESULT_OFFSET) + b"result and more"
    return made, SimpleNamespace(frames=far_frames, control=far_control)


def response(seq=7, length=6):
    return Response(0, 1, seq, length, 1, 2, 3, 4)


def test_given_a_frame_when_handed_over_then_the_worker_is_busy_until_it_answers():
    near, far = worker()
    assert (near.idle, near.state) == (True, "idle")
    assert near.run(1, 7, 64, 32, now_ns=5 * MS, observe=True)
    assert (near.idle, near.state, near.seq, near.busy_since_ns) == (False, "busy", 7, 5 * MS)
    request = unpack_request(far.frames.recv(256))
    assert (request.tier, request.seq, request.offset, request.length) == (1, 7, 64, 32)
    assert near.receive() is None
    far.frames.send(response().pack())
    assert near.receive() == (response(), b"result")
    assert near.idle


def test_given_a_frame_handed_over_when_another_thread_looks_at_any_moment_then_it_is_not_busy_since_long_ago():
    """The crew's thread kills what is busy for too long; it may look between any two assignments."""
    seen = []

    class Watched(WorkerProcess):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if vars(self).get("seq") is not None and "busy_since_ns" in vars(self):
                seen.append(self.busy_since_ns)

    near, _far = worker(Watched)
    near.run(0, 1, 0, 8, now_ns=10_000 * MS, observe=False)
    assert set(seen) == {10_000 * MS}


def test_given_a_worker_that_is_gone_when_a_frame_is_handed_over_then_it_says_so_and_is_not_used_again():
    near, far = worker()
    far.frames.close()
    assert not near.run(0, 1, 0, 8, now_ns=0, observe=False)
    assert (near.usable, near.idle, near.seq, near.state) == (False, False, None, "dead")
    with pytest.raises(EOFError):
        near.receive()


def test_given_a_full_queue_when_told_to_observe_then_it_is_counted_and_nobody_waits():
    near, _far = worker()
    for seq in range(5000):
        near.observe(seq, 0, 8, now_ns=0)
    assert 0 < near.missed_observations < 5000
    assert near.usable


def test_given_a_response_longer_than_its_area_when_received_then_it_is_a_protocol_error():
    near, far = worker()
    far.frames.send(response(length=16).pack())
    with pytest.raises(ProtocolError, match="response of 16 bytes in a result area of 15"):
        near.receive()


def test_given_control_messages_when_received_then_they_come_in_order_and_the_end_is_none():
    near, far = worker()
    assert near.receive_control() is None
    far.control.send(pack_control("hello"))
    far.control.send(pack_control("ready"))
    assert [near.receive_control()["kind"] for _ in range(2)] == ["hello", "ready"]
    assert near.speaking == {near.control.fileno()}
    far.control.close()
    assert near.receive_control() is None
    assert not near.speaking  # or whoever waits for it would spin until the process is gone
