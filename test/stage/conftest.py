import contextlib
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.settings.config import node_config, stage_configs
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.worker_pool import RestartPolicy
from torchperf_ros.workers.worker_setup import worker_setup

PATIENCE_S = 250.0
"""How long a test waits for what has to happen sooner or later, on a machine that others use as well."""
STORE = get_typestore(Stores.ROS2_HUMBLE)
TRIGGER = "geometry_msgs/msg/PointStamped"
S, MS = 1_000_000_000, 1_000_000


@pytest.fixture(scope="session", autouse=True)
def _adapters_can_be_imported_by_workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


def wait_until(condition, what, timeout_s=PATIENCE_S):
    """Look every 10 ms, for events without a notification."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {timeout_s} s: {what()}"
        time.sleep(0.01)


def trigger(stamp_ns, orders=None, x=0.0):
    """CDR bytes of a `PointStamped` whose `frame_id` carries the orders."""
    point = empty_message("geometry_msgs/msg/Point", x=x)
    text = json.dumps(orders) if orders else ""
    return bytes(encode(empty_message(TRIGGER, header=header(stamp_ns, text), point=point), TRIGGER))


class StageUnderTest:
    """A stage with real workers; what leaves it is kept, and can be waited for."""

    def __init__(
        self,
        folder,
        *,
        adapter="Controlled",
        name="tested",
        options=None,
        forgiving=True,
        start_timeout_s=PATIENCE_S,
        node=None,
        stream="",
        beside=None,
        **parameters,
    ):
        self.folder = folder
        self.news = threading.Condition()
        self.published, self.handed_on, self.answers, self.anomalies, self.logs = [], [], [], [], []
        values = {
            "adapter": adapter if ":" in adapter else f"adapters_under_test:{adapter}",
            "output": "path",
            "tiers": ["full", "fast"],
            "budget_ms": 5000.0,
            "hang_ms": 20_000.0,
            "hold_last_ms": 60_000.0,
            "max_frame_bytes": 65_536,
            "engine": "eager",
            **parameters,
        }
        self.options = {"folder": str(folder), **(options or {})}
        self.of = name, stream
        config = self._config(values)
        node = node_config({"device": "cpu", "worker_threads": 1, **(node or {})}, {})
        setup = replace(
            worker_setup(config.whole_stage, node), options=self.options, start_timeout_s=start_timeout_s
        )
        ports = StagePorts(
            publish=lambda payload: self._keep(self.published, payload),
            hand_on=lambda payload, frame: self._keep(self.handed_on, (payload, frame)),
            answered=lambda answer: self._keep(self.answers, answer),
            anomaly=lambda anomaly: self._keep(self.anomalies, anomaly),
            log=lambda severity, text: self._keep(self.logs, (severity, text)),
        )
        self.values = values
        self.actor = Stage(config, setup, ports, time.time_ns, beside=beside and beside.actor)
        if (
            forgiving and beside is None
        ):  # as if every worker had served for long: replaced at once however often it dies
            self.actor.pool.policies = [
                RestartPolicy(time.monotonic_ns, proven_s=0.0) for _ in range(config.workers)
            ]

    def _keep(self, where, what):
        with self.news:
            where.append(what)
            self.news.notify_all()

    def start(self, *, wait=True):
        self.actor.start()
        self.actor.activate()
        if wait:
            self.wait_for_workers()
        return self

    def _config(self, values):
        name, stream = self.of
        (config,) = [one for one in stage_configs(name, values) if one.stream == stream]
        return config

    def reconfigure(self, **parameters):
        self.actor.reconfigure(self._config({**self.values, **parameters}))

    @property
    def counters(self):
        return self.actor.statistics.counters

    @property
    def health(self):
        return self.actor.statistics.health.state(time.monotonic_ns())

    @property
    def pids(self):
        return [worker.pid for worker in self.actor.pool.workers if worker is not None]

    def wait_for_workers(self):
        """Wait until every worker of the pool is usable and idle.

        Fail at once if nobody looks after them.
        """
        pool = self.actor.pool

        def settled():
            threads = {thread.name for thread in threading.enumerate()}
            assert f"pool-{pool.config.name}" in threads, "the pool's thread is gone"
            with self.actor.lock:
                return self.actor.turn is None and all(
                    worker is not None and worker.idle for worker in pool.workers
                )

        wait_until(settled, lambda: f"every worker idle: {pool.progress}; {pool.last_error}")

    def wait_for(self, condition, what, timeout_s=PATIENCE_S):
        """Wait until something that leaves the stage makes the condition true."""
        with self.news:
            assert self.news.wait_for(condition, timeout_s), f"not within {timeout_s} s: {what}"

    def offer(self, orders=None, *, x=0.0, data=None, stamp_ns=None, **values):
        """Offer one frame; returns its number and stamp."""
        seq = self.counters.frames
        stamp_ns = time.time_ns() if stamp_ns is None else stamp_ns
        data = trigger(stamp_ns, orders, x) if data is None else data
        self.actor.offer(data, stamp_ns, stamped=True, **values)
        return seq, stamp_ns

    def answer(self, seq):
        """The one answer to a frame, waited for."""
        self.wait_for(lambda: any(a.frame.seq == seq for a in self.answers), f"frame {seq} is answered")
        (found,) = [answer for answer in self.answers if answer.frame.seq == seq]
        return found

    def ask(self, orders=None, **values):
        """Offer one frame and wait for its answer."""
        return self.answer(self.offer(orders, **values)[0])

    @contextlib.contextmanager
    def running(self, *, x=0.0, **orders):
        """A frame that runs until the block ends, however long that takes; gives its number and stamp."""
        go = self.folder / f"go-{self.counters.frames}"
        try:
            yield self.offer({"do": "wait", "until": go.name, **orders}, x=x)
        finally:
            go.touch()

    def alert(self, answer):
        """The one alert about an answer, waited for: it leaves a moment after the answer."""
        seq = str(answer.frame.seq)
        about = lambda: [each for each in list(self.anomalies) if each.values.get("seq") == seq]  # noqa: E731
        self.wait_for(about, f"an alert about frame {seq}")
        (found,) = about()
        return found

    def payload(self, answer):
        """What was published for a frame, decoded; None for nothing."""
        (data,) = [data for data, frame in self.handed_on if frame.seq == answer.frame.seq]
        return None if data is None else STORE.deserialize_cdr(data, "nav_msgs/msg/Path")

    def runner(self, answer):
        """The process that made what was published for a frame."""
        return round(self.payload(answer).poses[0].pose.position.z * 1e9)

    def in_flight(self):
        with self.actor.lock:
            return (self.actor.turn is not None) + (self.actor.mailbox.waiting is not None)

    def settle_accounts(self):
        """See that every frame became something.

        A frame that was just answered is in flight for a moment longer.
        """
        wait_until(lambda: len(set(self.accounts())) == 1, self.accounts)

    def accounts(self):
        """(frames, what they became): equal, by the law of conservation."""
        statistics, mailbox = self.counters, self.actor.mailbox
        return statistics.frames, statistics.ended + mailbox.superseded + self.in_flight()

    def notes(self, what, pid):
        """Stamps that a worker noted, in order."""
        path = self.folder / f"{what}-{pid}"
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []


@pytest.fixture(scope="module")
def settled_soon():
    """A new worker takes a place 0.1 s after it is ready, in place of 2 s.

    Histories are not the point where this is used.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchperf_ros.workers.rolling_update._SETTLE_NS", 100_000_000)
        yield


@pytest.fixture(scope="module")
def start_streams(tmp_path_factory):
    """Start the streams of a stage, by name; all are stopped when the module is done."""
    started = []

    def start(*names, **values):
        folder, streams = tmp_path_factory.mktemp("streams"), []
        for name in names:
            first = streams[0] if streams else None
            streams.append(StageUnderTest(folder, stream=name, beside=first, streams=list(names), **values))
        started.extend(reversed(streams))
        for stream in streams:
            stream.start(wait=False)
        streams[0].wait_for_workers()
        return streams

    yield start
    for stream in started:
        stream.actor.stop()


def _starter(tmp_path_factory):
    """Start stages; all of them are stopped when the module is done, or the test."""
    stages = []

    def start(*, wait=True, **values):
        stage = StageUnderTest(tmp_path_factory.mktemp("stage"), **values)
        stages.append(stage)
        return stage.start(wait=wait)

    yield start
    for stage in stages:
        stage.actor.stop()


start_stage = pytest.fixture(_starter, scope="module")
start_own_stage = pytest.fixture(_starter)
