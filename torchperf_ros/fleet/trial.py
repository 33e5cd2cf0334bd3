"""One candidate of one stage beside the other version: figures, when it may serve, how its trial ends."""

import math
import time
from dataclasses import replace
from typing import Final, cast

import psutil

from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.outcome import Health
from torchperf_ros.fleet.comparer import OutputComparer
from torchperf_ros.fleet.plan import CandidateFigures, Guards, broken_guard, why_not_to_serve
from torchperf_ros.fleet.shadow import Shadow, counts
from torchperf_ros.fleet.sources import Source, Wish
from torchperf_ros.observe.telemetry.memory import MemoryTrend
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.worker_pool import WorkerPool

_MINUTE_S: Final = 60.0
_SECOND_S: Final = 1.0
_MIB: Final = 1 << 20
_COUNTED: Final = ("frames", "deaths", "refused", "misses")


class Trial:
    """One candidate of one stage, from its start until one of the two versions leaves.

    Attributes:
        over: why it ends; "" while it goes on.
        leave_by_s: monotonic; from then on one ready worker of the other version is enough to exchange.
        served: whether the candidate did at the last look.
        waits: why it does not serve yet although it is to; "" mostly.
    """

    def __init__(self, stage: Stage, candidate: str) -> None:
        self.stage, self.candidate = stage, candidate
        if self.shadow is not None:
            self.shadow.figures.version = candidate
        self._begun = "" if self.shadow is None else self.shadow.version
        self.over, self.leave_by_s, self.served = "", math.inf, self.serves
        self.waits = ""
        self._comparer: OutputComparer | None = None
        self._safe_stops, self._in_safe_stop = 0, False
        self._trend = MemoryTrend()
        self._trend_pid, self._minute_s, self._second_s = 0, 0.0, 0.0
        self._memory_mib = self._mib_per_h = math.nan
        self._before = self._minute_before = self._counts()

    @property
    def shadow(self) -> Shadow | None:
        return cast("Shadow | None", self.stage.shadow)

    @property
    def serves(self) -> bool:
        return self.stage.version == self.candidate

    def may_exchange(self) -> bool:
        """Whether the shadow can serve as well as the version that does.

        What began with this trial is made able to.

        From `leave_by_s` on one worker of lowest priority is enough: it is better than a broken guard.
        """
        shadow = self.shadow
        if shadow is None or not shadow.pool.ready:
            return False  # no other version can serve, and the stage's fallbacks answer
        if shadow.version != self._begun or (self.serves and time.monotonic() >= self.leave_by_s):
            return True
        if not shadow.ready:
            shadow.promote()
        return shadow.ready

    def may_serve(self, limits: Guards) -> bool:
        """Whether the candidate has shown beside the other version that it may take its place.

        Else see `waits`.
        """
        shadow = self.shadow
        if shadow is not None:
            total = shadow.figures.total
            base_share = total.base_late / total.pairs if total.pairs else 0.0
            self.waits = why_not_to_serve(total.pairs, total.both, total.candidate_late, base_share, limits)
        return not self.waits

    def exchange(self, source: Source, wish: Wish) -> None:
        """Have the other version serve.

        At once where that is the way back, else once the candidate has shown that it can. It then needs all
        its workers as well.
        """
        if not self.serves and not self.may_serve(wish.limits):
            return
        shadow = self.shadow
        if shadow is None or shadow.exchanges or not self.may_exchange():
            return
        if not self.serves:
            try:
                source.begins()
            except TorchperfError as error:
                self.over = f"given up: {error}"
                return
        shadow.exchange()

    def ends(self, source: Source, wish: Wish) -> bool:
        """Hand the last minute to the source, and see whether the trial is over; `over` has the reason.

        Returns:
            Whether it ended now, and the source has to keep the candidate out.
        """
        refused = "" if self.serves or self.shadow is None else self.shadow.refused
        broken = broken_guard(wish.limits, self.figures()) or self.minute(source)
        not_wanted = self._not_wanted(wish)
        if refused:
            # A base that is refused beside a candidate that serves ends nothing.
            self.over = f"refused: {refused}"
        elif broken:
            self.over = f"{'rolled back' if self.serves else 'given up as a shadow'}: {broken}"
        elif not_wanted:
            self.over = f"over: {not_wanted}"
        bars = bool(refused or broken)
        if self.over:
            self.leave_by_s = time.monotonic() + (0.0 if bars else _MINUTE_S)
        return bars

    def _not_wanted(self, wish: Wish) -> str:
        # A wish with nothing beside says that the roll-out is done.
        if self.candidate == wish.candidate and wish.beside:
            return ""
        return wish.why or "not asked for any more"

    def compare(self) -> None:
        """Take the answers of both versions since the last call, and what was learned of their outputs."""
        shadow = self.shadow
        if shadow is None:
            return
        model = self.stage.model if self.serves else shadow.model
        pool, setup = model.pool, model.setup
        if pool.description is None:
            return
        if self._comparer is None:
            scorer = None
            if pool.description.scores:
                scorer = {"adapter": setup.adapter, "options": setup.options}
            self._comparer = OutputComparer(
                pool.description.output, self.stage.config.candidate_tolerance, scorer
            )
            shadow.comparing = self._comparer.hold
        if (found := self._comparer.take()) is not None:
            shadow.figures.compared(found)
        for pair in shadow.take_pairs():
            shadow.figures.add(pair, candidate_serves=self.serves)
            if pair.served is not None and pair.payload is not None:
                outputs = (pair.payload, pair.served) if self.serves else (pair.served, pair.payload)
                self._comparer.offer(pair.answer.frame.seq, *outputs, pair.known)
        if (now_s := time.monotonic()) - self._second_s > _SECOND_S:
            self._second_s = now_s
            self._weigh(pool, now_s)

    def _weigh(self, pool: WorkerPool, now_s: float) -> None:
        worker = pool.workers[0]
        if worker is None or worker.ready_at_ns is None:
            return
        if worker.pid != self._trend_pid:
            self._trend, self._trend_pid = MemoryTrend(), worker.pid
        try:
            memory = psutil.Process(worker.pid).memory_info()
        except psutil.Error:
            return
        self._memory_mib = (memory.rss - memory.shared) / _MIB
        self._trend.add(now_s, self._memory_mib)
        growth = self._trend.suspicion()
        self._mib_per_h = math.nan if growth is None else growth.mib_per_hour

    def changed_places(self) -> None:
        """The versions have, a while ago: count what guards are about since then."""
        self.served, self._in_safe_stop = self.serves, False
        shadow = self.shadow
        now = self._counts()  # a safe stop that goes on is not of what serves now
        then = (
            CandidateFigures(**shadow.counts_at_exchange)
            if self.serves and shadow is not None
            else replace(now, deaths=0)
        )
        self._before = self._minute_before = then
        self._safe_stops = 0

    def figures(self) -> CandidateFigures:
        return self._since(self._before)

    def _since(self, before: CandidateFigures) -> CandidateFigures:
        shadow = self.shadow
        total = None if shadow is None else shadow.figures.total
        compared = {"disagreements": total.different, "compared": total.compared} if total else {}
        now = self._counts()
        since = {name: getattr(now, name) - getattr(before, name) for name in _COUNTED}
        return CandidateFigures(
            **since, safe_stops=self._safe_stops, memory_mib_per_h=self._mib_per_h, **compared
        )

    def _counts(self) -> CandidateFigures:
        shadow = self.shadow
        if not self.serves:
            return (
                CandidateFigures()
                if shadow is None
                else CandidateFigures(deaths=shadow.deaths, refused=shadow.figures.total.candidate_refused)
            )
        is_stopped = self.stage.statistics.health.state(monotonic_ns()) is Health.SAFE_STOP
        self._safe_stops += is_stopped and not self._in_safe_stop
        self._in_safe_stop = is_stopped
        return CandidateFigures(**counts(self.stage))

    def minute(self, source: Source) -> str:
        """Hand the last minute over, if it has passed.

        Returns the guard that is broken within the last hour.
        """
        shadow, now_s = self.shadow, time.monotonic()
        self._minute_s = self._minute_s or now_s
        if shadow is None or now_s - self._minute_s < _MINUTE_S:
            return ""
        self._minute_s += _MINUTE_S
        figures, self._minute_before = self._since(self._minute_before), self._counts()
        return source.minute(shadow.figures.take_block(), figures, self._memory_mib, serves=self.serves)

    def target(self, wish: Wish) -> str:
        """Which of the two versions is to serve.

        Where neither is wished for any more, the one not on trial.
        """
        shadow = self.shadow
        both = [self.stage.version, *([] if shadow is None else [shadow.version])]
        if wish.serve in both:
            return wish.serve
        return next((one for one in both if one != self.candidate), both[0])

    def values(self) -> dict[str, str]:
        shadow = self.shadow
        found = {"version": self.stage.version, "candidate": f"{self.candidate}: {self._state()}"}
        if shadow is None:
            return found
        figures = shadow.figures
        found |= {"candidate_pairs": figures.words, "candidate_skipped": str(shadow.skipped)}
        left_out = 0 if self._comparer is None else self._comparer.left_out
        found |= {"candidate_lost_pairs": str(shadow.lost_pairs), "candidate_not_compared": str(left_out)}
        found |= {
            "candidate_differs": figures.last_difference,
            "candidate_refused": figures.last_refusal,
            "candidate_failed": figures.last_failure,
            "candidate_problem": "" if self._comparer is None else self._comparer.problem,
        }
        return {name: text for name, text in found.items() if text}

    def _state(self) -> str:
        shadow = self.shadow
        if self.over:
            return self.over
        if self.serves:
            return "serves"
        if shadow is None or not shadow.pool.ready:
            return f"starts: {'' if shadow is None else shadow.pool.progress}"
        return f"shadow, which is to serve and waits: {self.waits}" if self.waits else "shadow"

    def close(self) -> None:
        if self._comparer is not None:
            self._comparer.close()
