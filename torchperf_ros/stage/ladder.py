"""Which tier runs: the most accurate whose predicted p99 fits the time that is left."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.workers.calibration import Calibration, SortedWindow, usual_p99

_WINDOW = 128
_FEW = 16
_SPARED = 1  # slow run of a window, as that of a cold process; the next one counts
_SOON_NS = 4 * NS_PER_S
_FIRST_WAIT_NS = NS_PER_S // 2
_MOST_DOUBLINGS = 4  # 8 s: with three probes of each tier, the ladder is back within 10 s of a disturbance
_UNTRIED_NS = 2 * NS_PER_S
_RARELY_NS = 60 * NS_PER_S  # one result in 1,800 at 30 Hz


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run of a tier is predicted to take, from hand-over to result.

    Attributes:
        overhead_ms: of it decode, pre- and postprocessing and hand-over; a guess has that of other tiers'
            runs.
    """

    ms: float  # predicted p99
    runs: int = 0  # the tier's own recent runs that it comes from; 0: it is a guess
    # what a guess comes from: the p99 of the calibration, or the last probe's inference
    measured_ms: float = 0.0
    probed: bool = False  # whether that is a probe's
    # what a guess is scaled by: how much slower the tier in use is now than when it was calibrated
    factor: float = 1.0
    overhead_ms: float = 0.0

    @property
    def source(self) -> str:
        if self.runs:
            inference = f"{self.runs} own runs"
        else:
            measured = "last probe" if self.probed else "calibration"
            inference = f"{measured} {self.measured_ms:.1f} ms x {self.factor:.2f}"
        return f"{inference} + overhead {self.overhead_ms:.1f} ms"


class TierClock:
    """Predicts what a tier takes: from its own recent runs, before there are any from its calibration."""

    def __init__(self) -> None:
        self._inference = SortedWindow(_WINDOW)
        self._overhead = SortedWindow(_WINDOW)
        self._probed = False
        self.calibration = Calibration(0.0, 0.0)
        self.untry()

    def untry(self) -> None:
        """It was never tried: what was found before is of other models or other times."""
        self.failures = self.due_ns = 0
        self.tried_ns: int | None = None

    def calibrate(self, calibration: Calibration, *, probed: bool = False) -> None:
        """Take a measurement for the time in which there are no own runs; `probed`: of a run on a frame."""
        self.calibration, self._probed = calibration, probed

    def add(self, inference_ms: float, overhead_ms: float) -> None:
        self._inference.add(inference_ms)
        self._overhead.add(overhead_ms)

    def forget(self) -> None:
        """Fall back on the calibration, for a tier that has not run for a while."""
        self._inference.clear()
        self._overhead.clear()

    @property
    def slowdown(self) -> float | None:
        """Recent median over calibrated median.

        How much slower (or faster) the machine is than when calibrated.

        None where too few recent runs are known.
        """
        if len(self._inference) < _FEW or self.calibration.median_ms <= 0:
            return None
        return self._inference.quantile(0.5) / self.calibration.median_ms

    def forecast(self, slowdown: float = 1.0, overhead_ms: float = 0.0) -> Forecast:
        """The prediction; a guess is scaled by `slowdown` and has the `overhead_ms` of another tier."""
        runs = len(self._inference)
        if runs > _SPARED:
            own_ms = usual_p99(self._overhead, _SPARED)
            return Forecast(usual_p99(self._inference, _SPARED) + own_ms, runs, overhead_ms=own_ms)
        measured_ms = self.calibration.p99_ms
        return Forecast(
            measured_ms * slowdown + overhead_ms, 0, measured_ms, self._probed, slowdown, overhead_ms
        )

    @property
    def has_run(self) -> bool:
        """Whether there are own runs to learn from."""
        return len(self._inference) > 0

    @property
    def usual_overhead_ms(self) -> float:
        return self._overhead.quantile(0.5)

    def likely_ms(self, slowdown: float, overhead_ms: float) -> float:
        """What one run takes as a rule; the p99 of a calibration is that of whoever was busy beside it.

        Without own runs it has the `overhead_ms` of another tier.
        """
        if self.has_run:
            return self._inference.quantile(0.5) + self.usual_overhead_ms
        return self.calibration.median_ms * slowdown + overhead_ms


class TierLadder:
    """Chooses a tier for every frame.

    A ladder may have some of a stage's tiers only, in an order of its own. Tiers are named by their index
    in the stage, `level` and `left_out` count the ladder's own.

    Steps down at once when the current tier's prediction no longer fits a fresh frame's budget. A tier
    above is run now and then outside any frame's answer, see `probe`, also where its prediction does not fit:
    a prediction without own runs is a guess. `PROBES` such runs in a row that fit take the level up to it;
    one that does not fit, or a stay on the level that does not last, doubles the time until it is tried
    again, from 0.5 to 8 s.

    Attributes:
        tiers: the ladder's, from the most accurate one.
        level: place of the most accurate tier that frames get now.
        left_out: tiers that are not to run for now, from the most accurate one; `why_left_out` in words.
        forecasts: what each tier is predicted to take; replaced as a whole, so that any thread may look.
    """

    PROBES = 3

    def __init__(self, tiers: int | Sequence[int], clocks: Sequence[TierClock] = ()) -> None:
        """Start on the most accurate of so many tiers, or of these.

        `clocks` are those of all of the stage's tiers.
        """
        self.tiers = tuple(range(tiers)) if isinstance(tiers, int) else tuple(tiers)
        self._clocks = [clocks[tier] if clocks else TierClock() for tier in self.tiers]
        self._of = len(clocks) or len(self.tiers)
        self._overhead = SortedWindow(_WINDOW)
        self._slowdown = 1.0
        self._good = (0, 0)  # which tier is being probed, and how often it fitted
        self._fresh_ms = math.inf
        self._started_ns: int | None = None
        self._now_ns = self._since_ns = 0
        self.level = self.left_out = 0
        self.why_left_out = "while memory is short"
        self._predict()

    @property
    def last(self) -> int:
        return self.tiers[-1]

    @property
    def slowdown(self) -> float:
        """How much slower the machine is than when the tier in use was calibrated."""
        return self._slowdown

    def forecast(self, tier: int) -> Forecast:
        """What a run of the tier is predicted to take."""
        return self.forecasts[self.tiers.index(tier)]

    @property
    def tier(self) -> int:
        """The most accurate tier that frames get now."""
        return self.tiers[self.level]

    def calibrate(self, calibrations: Sequence[Calibration]) -> None:
        """Take a worker's measurements, one per tier of the stage; what was found before holds no more."""
        measured = dict(zip(range(self._of), calibrations, strict=True))
        for tier, clock in zip(self.tiers, self._clocks, strict=True):
            clock.calibrate(measured[tier])
            clock.untry()
        self._predict()

    def predicted_ms(self, tier: int) -> float:
        """Predicted p99 of a whole run of the tier.

        Inference plus decode, pre- and postprocessing and hand-over.
        """
        return self.forecast(tier).ms

    def likely_ms(self, tier: int) -> float:
        """What a whole run of the tier takes as a rule, rather than at worst."""
        clock = self._clocks[self.tiers.index(tier)]
        return clock.likely_ms(self._slowdown, 0.0 if clock.has_run else self._overhead_ms)

    def usual_overhead_ms(self, tier: int) -> float:
        """What a tier's run usually takes beside inference; of several frames not each is a bad one."""
        clock = self._clocks[self.tiers.index(tier)]
        return clock.usual_overhead_ms if clock.has_run else self.forecast(tier).overhead_ms

    def take_over(self, before: "TierLadder") -> None:
        """Go on where another ladder of the stage was in use: the machine is as slow as it was there."""
        self._slowdown = before._slowdown
        self._predict()

    def learn(self, tier: int, inference_ms: float, overhead_ms: float) -> None:
        """Learn from one run.

        Its inference, and all else from hand-over to result; none of another ladder.
        """
        if tier not in self.tiers:
            return
        self._clocks[self.tiers.index(tier)].add(inference_ms, overhead_ms)
        self._overhead.add(overhead_ms)
        self._predict()

    def _predict(self) -> None:
        self._slowdown = self._clocks[self.level].slowdown or self._slowdown
        overhead_ms = self._overhead_ms
        self.forecasts = tuple(clock.forecast(self._slowdown, overhead_ms) for clock in self._clocks)

    @property
    def _overhead_ms(self) -> float:
        return usual_p99(self._overhead, _SPARED) if len(self._overhead) > _SPARED else 0.0

    def choose(self, left_ms: float, fresh_ms: float, now_ns: int) -> int:
        """The tier for a frame that has `left_ms` until its answer has to leave.

        The cheapest one where none fits.

        `fresh_ms` is the time that a frame has which did not wait; it decides the level.
        """
        self._now_ns, self._fresh_ms = now_ns, fresh_ms
        if self._started_ns is None:
            self._started_ns = self._since_ns = now_ns
        level = self._first_fit(fresh_ms, max(self.level, self.left_out))
        if level > self.level:
            soon = now_ns - self._since_ns < _SOON_NS
            for tier in range(max(self.level, self.left_out), level):
                if self.forecasts[tier].runs:  # what only a guess rules out is tried at once
                    self._failed(tier, again=soon)
            self._step(level)
        return self.tiers[self._first_fit(left_ms, self.level)]

    def _first_fit(self, left_ms: float, start: int) -> int:
        last = len(self.tiers) - 1
        return next((tier for tier in range(start, last) if self.forecasts[tier].ms <= left_ms), last)

    def _failed(self, tier: int, *, again: bool) -> None:
        """Leave the tier alone for a while, longer if it failed before."""
        clock = self._clocks[tier]
        clock.failures = clock.failures + 1 if again else 1
        clock.due_ns = self._now_ns + (_FIRST_WAIT_NS << min(clock.failures - 1, _MOST_DOUBLINGS))

    def _step(self, level: int) -> None:
        self.level, self._since_ns, self._good = level, self._now_ns, (0, 0)
        for clock in self._clocks[
            :level
        ]:  # what is above has not run for a while by the time it is asked for again
            clock.forget()
        self._predict()

    def probe(
        self, fresh_ms: float, now_ns: int, room_ms: float = math.inf, longest_ms: float = math.inf
    ) -> int | None:
        """The tier to try now, outside any frame's answer, or None.

        With a spare worker, every tier above the level whose time has come, see `_above`. Without one, only
        where a frame that arrives as expected could still wait for the probe and then run the cheapest tier
        within its time; what is a guess only is tried once after 2 s, and what does not fit once a minute.

        Args:
            fresh_ms: the time that a frame has which did not wait.
            now_ns: monotonic time.
            room_ms: without a spare worker, time until the next frame is expected.
            longest_ms: a tier that is likely to take longer is not tried at all.
        """
        self._now_ns = now_ns
        for tier in self._above():
            clock = self._clocks[tier]
            likely_ms = clock.likely_ms(self._slowdown, self._overhead_ms)
            fits = likely_ms <= max(room_ms, room_ms + fresh_ms - self.forecasts[-1].ms)
            fits = fits or (self._good[0] == tier and self._good[1] > 0)  # its last run did
            rarely_ns = (
                (self._started_ns or 0) + _UNTRIED_NS
                if clock.tried_ns is None
                else clock.tried_ns + _RARELY_NS
            )
            if likely_ms <= longest_ms and now_ns >= max(clock.due_ns, 0 if fits else rarely_ns):
                clock.tried_ns = now_ns
                return self.tiers[tier]
        return None

    def _above(self) -> list[int]:
        """Tiers above the level that may run, those first that failed least, of these the cheapest."""
        return sorted(
            range(self.level - 1, self.left_out - 1, -1), key=lambda tier: self._clocks[tier].failures
        )

    def probed(self, tier: int, inference_ms: float, whole_ms: float, fresh_ms: float) -> None:
        """A probe of `tier` took `whole_ms`.

        After enough that fit, step up; one that does not delays the next.

        `inference_ms` of it was inference, NaN if it came to none. `whole_ms` is infinite if there was no
        good result.
        """
        if tier not in self.tiers[: self.level]:
            return
        tier = self.tiers.index(tier)
        clock = self._clocks[tier]
        if whole_ms > fresh_ms:
            self._failed(tier, again=True)
            self._good = (0, 0)
            clock.forget()
            if not math.isnan(inference_ms):
                clock.calibrate(Calibration(*[inference_ms / self._slowdown] * 2), probed=True)
            self._predict()
            return
        clock.add(inference_ms, whole_ms - inference_ms)
        self._good = (tier, self._good[1] + 1 if self._good[0] == tier else 1)
        if self._good[1] >= self.PROBES:
            self._step(tier)
        self._predict()

    def explain(self, names: Sequence[str], now_ns: int) -> str:
        """What keeps the ladder from a more accurate tier, in words; empty on the most accurate one.

        `names` are those of all of the stage's tiers.
        """
        names = [names[tier] for tier in self.tiers]
        level, left_out = self.level, self.left_out
        if not level:
            return ""
        if left_out >= level:
            return f"{names[level - 1]} is left out {self.why_left_out}"
        tier = min(
            self._above(), key=lambda tier: self._clocks[tier].due_ns, default=level
        )  # just stepped up?
        forecast, fresh_ms = self.forecasts[tier], self._fresh_ms
        relation = ">" if forecast.ms > fresh_ms else "<="
        text = f"{names[tier]} predicted {forecast.ms:.1f} ms {relation} {fresh_ms:.1f} left"
        wait_s = (self._clocks[tier].due_ns - now_ns) / NS_PER_S
        if wait_s > 0:
            return f"{text}; next probe in {wait_s:.1f} s"
        good = self._good[1] if self._good[0] == tier else 0
        return f"{text}; {good} of {self.PROBES} probes fitted, next one when a worker has the time"
