import math
import time
from types import SimpleNamespace

import pytest

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.alert_actions import AlertActions
from torchperf_ros.stage.figures import StageStatistics
from torchperf_ros.stage.frame import Answer, Frame, Mailbox, Origin, StepTimes
from torchperf_ros.stage.inputs import InputSync
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.limits import MemoryGuard
from torchperf_ros.stage.practice import HedgeRule
from torchperf_ros.stage.scenes import SceneChooser
from torchperf_ros.stage.waiter import PublishMargin
from torchperf_ros.workers.control import TierFacts
from torchperf_ros.workers.worker_pool import TierTally
from torchperf_ros.workers.worker_process import WorkerWords


class PoolAtRest:
    """A pool as telemetry sees it, without processes."""

    rolling_update = SimpleNamespace(compiling="", builder=SimpleNamespace(lacked={"key": "no memory"}))

    def __init__(self, workers, tiers):
        self.workers = workers
        self.tally = TierTally(tiers)
        self.description = SimpleNamespace(device="cpu")
        self.ready = any(worker is not None for worker in workers)
        self.progress = "; ".join(f"worker {n} {self.state(n)}" for n in range(len(workers)))
        self.restarts = 3
        self.unended, self.unended_pids = 1, [4711]
        self.last_error = ""
        self.ring = SimpleNamespace(used_bytes=3 << 20)

    @property
    def everyone(self):
        return [worker for worker in self.workers if worker is not None]

    def state(self, number):
        worker = self.workers[number]
        return "waits for its restart" if worker is None else worker.state


@pytest.fixture
def make_worker():
    """A worker as telemetry sees it; `facts`: what it says of its tiers."""

    def make(pid=77, state="idle", facts=(), out_of_memory=0, number=0, memory_bytes=(), tier=None):
        return SimpleNamespace(
            pid=pid,
            number=number,
            state=state,
            usable=state == "idle",
            tier=tier,
            reported=WorkerWords(
                memory_bytes=dict(memory_bytes),
                tiers=tuple(TierFacts(**each) for each in facts),
                out_of_memory=out_of_memory,
            ),
        )

    return make


class StageAtRest(SimpleNamespace):
    """A stage as telemetry sees it, of the one version that its parameters make."""

    shadow, version, place = None, "base", 0

    @property
    def ring(self):
        return self.pool.ring

    @property
    def everyone(self):
        return self.pool.everyone


@pytest.fixture
def make_stage():
    """A stage as telemetry sees it: real statistics, health and rules, no processes."""

    def make(name="perception", *, workers=(None, None), ready=True, **values):
        config = stage_config(name, {"adapter": "a:B", "output": f"{name}_output", **values})
        statistics = StageStatistics(config)
        if ready:
            statistics.health.ready()
        return StageAtRest(
            guard=None,
            sync=InputSync(name, config.sync) if config.sync else None,
            config=config,
            statistics=statistics,
            ladder=(ladder := TierLadder(len(config.tiers))),
            ladders=[ladder],
            scenes=SceneChooser(config),
            budget_ms=config.budget_ms,
            actions=AlertActions(config),
            margin=PublishMargin(),
            mailbox=Mailbox(),
            memory=MemoryGuard(),
            hedge_rule=HedgeRule(),
            pool=PoolAtRest(list(workers), config.tiers),
        )

    return make


@pytest.fixture
def make_answer():
    def make(
        outcome=Outcome.ON_TIME, fallback=None, *, seq=0, total_ms=10.0, tier=0, steps=None, age_ms=4.0
    ):
        now_ns = time.monotonic_ns()
        frame = Frame(seq, b"", 5, age_ms, now_ns, now_ns, Origin(now_ns, math.nan))
        steps = steps or StepTimes(1.0, 2.0, 3.0, 4.0)
        return Answer(frame, outcome, fallback, "", tier, 0.5, total_ms, 50.0, -1.0, now_ns, steps)

    return make


@pytest.fixture
def answered():
    """Let a stage receive and answer a frame."""

    def let(stage, answer):
        stage.statistics.received(answer.frame, stamped=True)
        return stage.statistics.answered(answer)

    return let
