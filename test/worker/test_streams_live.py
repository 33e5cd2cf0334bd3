"""A pool whose workers serve several streams, with real processes."""

import queue
import select
import time
from dataclasses import replace

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.config import node_config, stage_config
from torchperf_ros.workers.frame_ring import InputBytes
from torchperf_ros.workers.worker_pool import WorkerPool
from torchperf_ros.workers.worker_process import RunPart
from torchperf_ros.workers.worker_setup import worker_setup

from ..stage.conftest import PATIENCE_S, STORE, S, trigger

STREAMS = ("front", "left", "right")


class Listener:
    """Keeps what the pool reports."""

    def __init__(self):
        self.ready, self.said = queue.Queue(), []

    def worker_ready(self, worker):
        worker.serve()
        self.ready.put(worker)

    def worker_died(self, worker, reason, *, lasting):
        self.said.append(reason)

    def worker_told(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    values = {
        "adapter": "adapters_under_test:Together",
        "output": "path",
        "tiers": ["full", "fast"],
        "engine": "eager",
        "max_frame_bytes": 1 << 20,
        "hang_ms": 20_000.0,
    }
    config = stage_config("tested", values)
    setup = replace(
        worker_setup(config, node_config({"device": "cpu", "worker_threads": 1}, {})),
        options={"folder": str(tmp_path_factory.mktemp("streams"))},
        streams=STREAMS,
        batch=len(STREAMS),
        start_timeout_s=PATIENCE_S,
    )
    listener = Listener()
    pool = WorkerPool(config, setup, listener, lambda severity, text: listener.said.append(text))
    pool.start()
    try:
        yield pool, [listener.ready.get(timeout=PATIENCE_S) for _ in range(2)], listener
    finally:
        pool.stop()


def test_given_a_stage_with_streams_when_another_version_would_read_its_ring_then_it_is_refused(served):
    pool, (worker, _), listener = served
    with pytest.raises(ConfigError, match="stage tested has 3 streams; no other version"):
        WorkerPool(pool.config, worker.setup, listener, print, pool.ring)


def written(pool, stream, seq, x):
    """A frame in the ring of its stream, as a part of a batch."""
    item = InputBytes(0, S, 0.0, trigger(S, x=x))
    return RunPart(stream, seq, *pool.rings[stream].write(seq, [item]), leave_ns=0, observe=True)


def answers(worker, count):
    """So many answers: by stream the number of the frame and the x of what came of it."""
    found = {}
    while len(found) < count:
        assert select.select([worker.frames], [], [], PATIENCE_S)[0]
        if (received := worker.receive()) is None:
            continue
        response, payload = received
        assert response.outcome == Outcome.ON_TIME, payload
        path = STORE.deserialize_cdr(payload, "nav_msgs/msg/Path")
        found[response.stream] = (response.seq, path.poses[0].pose.position.x)
        assert worker.idle == (len(found) == count)
    return found


def test_given_streams_when_workers_are_ready_then_each_knows_what_a_batch_takes(served):
    pool, workers, listener = served
    assert len(pool.rings) == len(STREAMS)
    assert pool.ring is pool.rings[0]
    for worker in workers:
        assert (worker.batching.most, worker.batching.refusal) == (3, "")
        assert [[size for size, _ in pairs] for pairs in worker.batching.times_ms] == [[1, 2, 3]] * 2
    # the second one takes over what the first has measured
    assert workers[0].batching == workers[1].batching == workers[1].setup.batching
    assert listener.said == []


def test_given_frames_of_several_streams_when_given_together_or_alone_then_each_is_answered(served):
    pool, (worker, other), _ = served
    parts = [written(pool, stream, 5 + stream, float(stream)) for stream in (2, 0, 1)]
    assert worker.run_batch(1, parts, time.monotonic_ns())
    assert (worker.idle, worker.seq) == (False, 7)
    assert answers(worker, 3) == {2: (7, 1002.0), 0: (5, 1000.0), 1: (6, 1001.0)}
    assert worker.seq is None
    part = written(pool, 1, 9, 4.0)
    place = part.seq, part.offset, part.length
    assert other.observe(*place, time.monotonic_ns(), stream=1)
    assert worker.run(0, *place, time.monotonic_ns(), observe=True, stream=1)
    assert answers(worker, 1) == {1: (9, 4.0)}
    assert all(ring.used_bytes < 1 << 20 for ring in pool.rings)
