"""Which stage goes first.

One of lower priority begins no frame that would run while a higher one has a frame due.

Asked by the lower stage with its own lock held. It only looks at what the higher ones leave behind and
takes no lock of theirs. A higher stage that has answered wakes a lower one that waits to begin.

The lower stage pays for this with frames that it does not begin, so the higher one has to gain by it.
Whether it does is measured: of the higher frames that ran beside a run of the lower stage, more have to be
missed than of those that ran alone. On a machine that other programs keep full they are not, and the lower
stage runs as without a priority.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.settings.config import NodeConfig, StageConfig
from torchperf_ros.stage.frame import Frame

_LOOK_AGAIN_NS = 5 * NS_PER_MS  # if it is not woken before
_FIRST_TRIAL_NS, _LONGEST_WAIT_NS = NS_PER_S, 64 * NS_PER_S
_SHORTEST_WAIT_NS = NS_PER_S // 10
_RELEARN_NS = 300 * NS_PER_S  # after which what was found to cost deadlines may cost none any more
_FORGET = 0.999  # what a frame leaves of the weight of those before it: the last thousand count
_ENOUGH = 30.0  # frames beside a run, to know that they are missed no more often than others
# of the frames beside a run; fewer that are missed are no gain worth a frame of the lower stage
_TOLERATED = 0.01
_FEWEST_MISSES = 3.0  # beyond what is usual, to know that runs cost deadlines
# So long the longest run counts.
#
# Of the last few runs the next one is often the longest, of those in a longer time it seldom is;
# but after a stall nothing may begin for as long.
_KEPT_NS = 16 * NS_PER_S
NEVER_NS = 1 << 62
_INTERVALS = 8  # the shortest of so many says when the next frame may come


class Ranked(Protocol):
    """A stage as those of other priorities see it."""

    lower: list[Any]

    @property
    def config(self) -> StageConfig:
        """Its parameters; `priority` is what counts."""

    @property
    def runs_on_cpu(self) -> bool:
        """Whether its models run on the CPU, as far as that is known."""

    def due_ns(self, now_ns: int) -> int:
        """When it has or expects a frame that a worker is to run."""

    def give_way(self, right_of_way: "RightOfWay") -> None:
        """Begin nothing that would run while a stage of higher priority has a frame due."""


class Arrivals:
    """When frames came to a stage, and when the next one is expected."""

    def __init__(self) -> None:
        self._intervals_ns: deque[int] = deque(maxlen=_INTERVALS)
        self._last_ns = 0
        self._comes_by_itself = False  # rather than from the stage before

    def add(self, frame: Frame) -> None:
        if self._last_ns:
            self._intervals_ns.append(frame.received_ns - self._last_ns)
        self._last_ns = frame.received_ns
        self._comes_by_itself = not frame.comes_from_a_stage

    @property
    def next_ns(self) -> int:
        """The earliest receipt of the next frame: the shortest interval after the last one."""
        return self._last_ns + min(self._intervals_ns, default=0)

    def have_ended(self, now_ns: int) -> bool:
        """Whether frames come no more: twice the longest of the last intervals has gone by without one."""
        return now_ns > self._last_ns + 2 * max(self._intervals_ns, default=0)

    def expected_ns(self, now_ns: int) -> int:
        """When the next frame is expected; `NEVER_NS` for a stage that another stage triggers."""
        period_ns = min(self._intervals_ns, default=0) if self._comes_by_itself else 0
        return expected_ns(self._last_ns, period_ns, now_ns)


class RightOfWay:
    """The stages that one stage gives way to, and when they are due.

    Attributes:
        ended_ns: when the last run of the own stage ended.
        is_free: its runs were found to cost the higher stages no deadlines.
    """

    def __init__(
        self, own: Ranked, higher: Sequence[Ranked], *, has_own_cores: bool, learns: bool = True
    ) -> None:
        """Take the stages; `has_own_cores`: on the CPU there is a core for every thread of every stage.

        `learns`: whether it counts what giving way is good for; else it is always done.
        """
        self._own, self._higher, self._has_own_cores, self._learns = own, higher, has_own_cores, learns
        self.ended_ns, self.is_free = 0, False
        self._costs_since_ns = 0  # since when it is known that runs cost deadlines; 0: it is not known
        self._beside, self._alone = (
            [0.0, 0.0],
            [0.0, 0.0],
        )  # frames of the higher stages, and how many were missed
        self._begun_ns, self._wait_ns = -1, _FIRST_TRIAL_NS  # -1: never asked yet
        # ends and ms of runs, each longer than all after it
        self._longest: deque[tuple[int, float]] = deque()

    def ran(self, took_ms: float, now_ns: int) -> None:
        """A run on the cheapest tier took so long."""
        while self._longest and self._longest[-1][1] <= took_ms:
            self._longest.pop()
        self._longest.append((now_ns, took_ms))

    def answered(self, now_ns: int, *, missed: bool, beside_a_run: bool) -> None:
        """A higher stage has answered a frame; on its thread."""
        if not self._learns:
            return
        counted = self._beside if beside_a_run else self._alone
        counted[0] = counted[0] * _FORGET + 1.0
        counted[1] = counted[1] * _FORGET + missed
        frames, misses = self._beside
        usual = self._alone[1] / self._alone[0] if self._alone[0] else 0.0
        beyond = misses - usual * frames
        if beyond >= max(_FEWEST_MISSES, _TOLERATED * frames):
            self.is_free, self._costs_since_ns = False, self._costs_since_ns or now_ns
        elif beyond <= _TOLERATED * frames and frames >= _ENOUGH:
            self.is_free, self._costs_since_ns = True, 0
        elif beside_a_run and not missed and not self._costs_since_ns:
            self._wait_ns = max(self._wait_ns // 4, _SHORTEST_WAIT_NS)  # it doubled as that run began

    def due(self, now_ns: int) -> tuple[int, str]:
        """The monotonic time at which the first of them has, or expects, a frame, and its name.

        `NEVER_NS`: none.

        What costs the higher stages nothing need not look when they are due.
        """
        if self.is_free:
            return NEVER_NS, ""
        if self._has_own_cores and self._own.runs_on_cpu:
            return NEVER_NS, ""
        return min(
            ((stage.due_ns(now_ns), stage.config.name) for stage in self._higher), default=(NEVER_NS, "")
        )

    def left_ms(self, now_ns: int) -> float:
        """Time until one of them has, or expects, a frame."""
        return (self.due(now_ns)[0] - now_ns) / NS_PER_MS

    def blocks(self, now_ns: int, guess_ms: float) -> tuple[int, str] | None:
        """When to look again, and why a run must not begin; None: it may.

        It counts as long as the longest of the last seconds; without any, as the guess. What takes too long
        now would never be found to be faster again: 1, 2, 4 s and so on, at last a minute, after the last
        one a run may begin that only a frame to come speaks against. The scheduler, which knows the workers
        as nicer, then pushes it aside. Such trials come sooner while those before cost no deadline:
        `answered` counts what they cost.
        """
        if self._costs_since_ns and now_ns - self._costs_since_ns > _RELEARN_NS:
            self._costs_since_ns, self._beside = 0, [0.0, 0.0]
        while self._longest and now_ns - self._longest[0][0] > _KEPT_NS:
            self._longest.popleft()
        run_ms = self._longest[0][1] if self._longest else guess_ms
        due_ns, name = self.due(now_ns)
        self._begun_ns = now_ns if self._begun_ns < 0 else self._begun_ns
        fits = now_ns + round(run_ms * NS_PER_MS) <= due_ns
        if fits or (due_ns > now_ns and now_ns - self._begun_ns >= self._wait_ns):
            self._wait_ns = self._wait_ns if fits else min(2 * self._wait_ns, _LONGEST_WAIT_NS)
            self._begun_ns = now_ns
            return None
        in_ms = (due_ns - now_ns) / NS_PER_MS
        what = "had a frame to answer" if in_ms <= 0 else f"expected a frame in {in_ms:.1f} ms"
        return max(now_ns, due_ns) + _LOOK_AGAIN_NS, f"not begun: stage {name}, of higher priority, {what}"


def expected_ns(last_ns: int, period_ns: int, now_ns: int) -> int:
    """When the next of frames that come with this period is due.

    Two periods without one end the expectation.
    """
    if not period_ns or now_ns > last_ns + 2 * period_ns:
        return NEVER_NS
    return max(now_ns, last_ns + period_ns)


def set_right_of_way(stages: Sequence[Ranked], config: NodeConfig, cores: int | None = None) -> None:
    """Have each stage give way to those of higher priority.

    `cores` of this process, 0: they share them anyhow.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    threads = config.worker_threads * len(config.whole_stages)
    has_own_cores = 0 < threads + 1 <= cores and bool(threads)
    for stage in stages:
        # Streams of one stage share its workers, which take the frames of the higher priority first.
        others = [one for one in stages if one is stage or one.config.stage != stage.config.stage]
        higher = [other for other in others if other.config.priority > stage.config.priority]
        if higher:
            stage.give_way(RightOfWay(stage, higher, has_own_cores=has_own_cores, learns=cores > 0))
            for other in higher:
                other.lower.append(stage)
