"""What a stage remembers of its frames: counters, health, and the anomalies that follow."""

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import Clock, monotonic_ns
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.alert_rules import answer_alert, death_alert, superseded_alert
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.health import Flow, HealthTracker
from torchperf_ros.stage.stage_figures import StageCounters, StageFigures


class StageStatistics:
    """Counters and health of one stage; every event passes here once.

    Attributes:
        figures: latency and jitter, computed from them by who asks.
    """

    def __init__(self, config: StageConfig, clock: Clock = monotonic_ns) -> None:
        """Start empty."""
        self._clock = clock
        # of frames, answers and runs, and the raw numbers of the last frames
        self.counters = StageCounters()
        now_ns = clock()
        self.figures = StageFigures(self.counters, config.tiers, config.budget_ms, config.window_s, now_ns)
        self.health = HealthTracker(config, now_ns)  # the state machine
        self._not_stale: Frame | None = None  # the last frame

    def reconfigure(self, config: StageConfig) -> None:
        """Take changed limits."""
        self.health.limits = config
        self.figures.window_s = config.window_s

    def activated(self) -> None:
        """Frames are taken from now on."""
        self.counters.activated_ns = self._clock()

    def received(self, frame: Frame, superseded: int = 0, *, stamped: bool) -> Alert | None:
        """Count a frame that came in, whose number is how many came before.

        Returns what there is to tell about it.

        `superseded`: how many frames were so far; `stamped`: its message type has a stamp.
        """
        counters, received_ns = self.counters, frame.received_ns
        counters.received(received_ns, frame.stamp_ns, frame.age_ms, superseded, stamped=stamped)
        self.health.input_at(received_ns)
        rule = self.health.superseded
        if received_ns < rule.due_ns:
            return None
        rule.look(Flow(received_ns, counters.frames, superseded, counters.ended, counters.busy_ms))
        return None if rule.broken is None else superseded_alert(self.health.limits.name, rule.broken)

    def answered(self, answer: Answer) -> Alert | None:
        """A frame was answered; returns what there is to tell about it."""
        self.counters.add(answer)
        limits = self.health.limits
        tiers = limits.scenes[answer.frame.scene].tiers
        place = tiers.index(answer.tier) if answer.tier in tiers else -1  # in the ladder of its scene
        self.health.answered(answer.outcome, answer.fallback, place, answer.check)
        if not answer.frame.stale:
            self._not_stale = answer.frame
        misses = self.health.misses_in_a_row
        return answer_alert(limits.name, answer, misses, limits.sustained_misses, self._not_stale)

    def worker_died(self, reason: str, pid: int, restarts: int, *, lasting: bool, alone: bool) -> Alert:
        """A worker died; `lasting`: its kind keeps dying, `alone`: no other can serve."""
        if alone:
            self.health.lost()
            if lasting:
                self.health.gave_up()
        return death_alert(self.health.limits.name, reason, pid, restarts, lasting=lasting)
