"""Which stage goes first: one of lower priority begins no frame that would run while a higher one has a frame due.

Asked by the lower stage with its own lock held. It only looks at what the higher ones leave behind and takes no lock of
theirs. A higher stage that has answered wakes a lower one that waits to begin.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchperf_ros.config.config import NodeConfig
from torchperf_ros.frame.clock import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from torchperf_ros.stage.stage_actor import StageActor

_LOOK_AGAIN_NS = 5 * NS_PER_MS  # if nobody wakes it before
_FIRST_TRIAL_NS, _LONGEST_WAIT_NS = NS_PER_S, 64 * NS_PER_S
_KEPT_NS = 16 * NS_PER_S
"""So long the longest run counts. Of the last few runs the next one is often the longest, of those in a longer time it
seldom is; but after a stall nothing may begin for as long."""
NEVER_NS = 1 << 62


class RightOfWay:
    """The stages that one stage gives way to, and when they are due."""

    def __init__(self, own: "StageActor", higher: "Sequence[StageActor]", *, has_own_cores: bool) -> None:
        """Take the stages; `has_own_cores`: on the CPU there is a core for every thread of every stage."""
        self._own, self._higher, self._has_own_cores = own, higher, has_own_cores
        self._begun_ns, self._wait_ns = -1, _FIRST_TRIAL_NS  # -1: never asked yet
        self._longest: deque[tuple[int, float]] = deque()  # ends and ms of runs, each longer than all after it

    def ran(self, took_ms: float, now_ns: int) -> None:
        """A run on the cheapest tier has ended."""
        while self._longest and self._longest[-1][1] <= took_ms:
            self._longest.pop()
        self._longest.append((now_ns, took_ms))

    def due(self, now_ns: int) -> tuple[int, str]:
        """The monotonic time at which the first of them has, or expects, a frame, and its name; `NEVER_NS`: none."""
        description = self._own.pool.description
        if self._has_own_cores and description is not None and description.device == "cpu":
            return NEVER_NS, ""
        return min(((stage.due_ns(now_ns), stage.config.name) for stage in self._higher), default=(NEVER_NS, ""))

    def blocks(self, now_ns: int, guess_ms: float) -> tuple[int, str] | None:
        """When to look again, and why a run must not begin; None: it may.

        It counts as long as the longest of the last seconds; without any, as the guess. What takes too long now would
        never be found to be faster again: 1, 2, 4 s and so on, at last a minute, after the last one a run may begin
        that only a frame to come speaks against. The scheduler, which knows the workers as nicer, then pushes it aside.
        """
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
    """When the next of frames that come with this period is due; two periods without one end the expectation."""
    if not period_ns or now_ns > last_ns + 2 * period_ns:
        return NEVER_NS
    return max(now_ns, last_ns + period_ns)


def set_right_of_way(stages: "Sequence[StageActor]", config: NodeConfig, cores: int | None = None) -> None:
    """Have each stage give way to those of higher priority; `cores` of this process, 0: they share them anyhow."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    has_own_cores = 0 < config.worker_threads * len(stages) + 1 <= cores and bool(config.worker_threads)
    for stage in stages:
        higher = [other for other in stages if other.config.priority > stage.config.priority]
        if higher:
            stage.give_way(RightOfWay(stage, higher, has_own_cores=has_own_cores))
            for other in higher:
                other.lower.append(stage)
