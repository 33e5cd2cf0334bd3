"""Which tier runs: the most accurate whose predicted p99 fits the time that is left."""

from dataclasses import dataclass

from torchperf_ros.core.sorted_window import SortedWindow

_WINDOW = 128
_OUTLIER_RATIO = 4.0
_OUTLIER_SHARE = 0.10
_FEW = 16
_MOST_PATIENT = 32


def usual_p99(window: SortedWindow) -> float:
    """99th percentile of the samples without isolated stalls.

    Stalls (over 4 times the median, at most 10 % of the samples or one) are left out: they are faults that no tier
    avoids and that the backup answers. More of them count, as then the tier itself is slow.
    """
    usual = window.count_up_to(_OUTLIER_RATIO * window.quantile(0.5))
    stalls = len(window) - usual
    return window.quantile(0.99, usual if stalls <= max(1.0, _OUTLIER_SHARE * len(window)) else None)


@dataclass(frozen=True)
class Calibration:
    """Inference time of a tier, measured by a worker before its first frame."""

    median_ms: float
    p99_ms: float


class TierClock:
    """Predicts a tier's p99 inference time: calibrated at first, then from its own recent runs."""

    def __init__(self) -> None:
        """Start without any knowledge: a prediction of 0."""
        self._recent = SortedWindow(_WINDOW)
        self.calibration = Calibration(0.0, 0.0)

    def add(self, inference_ms: float) -> None:
        """Learn from one run."""
        self._recent.add(inference_ms)

    def forget(self) -> None:
        """Fall back on the calibration, for a tier that has not run for a while."""
        self._recent.clear()

    @property
    def slowdown(self) -> float | None:
        """Recent median over calibrated median: how much slower (or faster) the machine is than when calibrated.

        None where too few recent runs are known to say so.
        """
        if len(self._recent) < _FEW or self.calibration.median_ms <= 0:
            return None
        return self._recent.quantile(0.5) / self.calibration.median_ms

    def p99_ms(self, slowdown: float = 1.0) -> float:
        """Predicted p99 in ms; `slowdown` scales the calibration where there are few recent runs."""
        calibrated_ms = self.calibration.p99_ms * slowdown
        if not len(self._recent):
            return calibrated_ms
        recent_ms = usual_p99(self._recent)
        return max(recent_ms, calibrated_ms) if len(self._recent) < _FEW else recent_ms


class TierLadder:
    """Chooses a tier for every frame.

    Steps down at once when the current tier's prediction no longer fits a fresh frame's budget. Steps up one tier
    after `step_up_after` frames in a row in which the next tier would have fitted, and only after
    `PROBES` runs of it outside any frame's answer (see `probe`) that fitted as well. A step up that does not last,
    or a probe that does not fit, doubles that patience (up to 32 times), so that the tier does not flap.

    Attributes:
        level: index of the most accurate tier that frames get now.
        left_out: tiers that are not to run for now, from the most accurate one, as for want of memory.
    """

    PROBES = 3

    def __init__(self, tiers: int, step_up_after: int = 30) -> None:
        """Start on the most accurate of `tiers` >= 1 tiers."""
        self._clocks = [TierClock() for _ in range(tiers)]
        self._overhead = SortedWindow(_WINDOW)
        self._step_up_after = step_up_after
        self._patience = step_up_after
        self._fitting = 0
        self._probes = 0
        self._frames_on_level = 0
        self.level = 0
        self.left_out = 0
        self._slowdown = 1.0
        self._predicted = [0.0] * tiers

    @property
    def last(self) -> int:
        """Index of the cheapest tier."""
        return len(self._clocks) - 1

    def calibrate(self, calibrations: list[Calibration]) -> None:
        """Take a worker's measurements, one per tier."""
        for clock, calibration in zip(self._clocks, calibrations, strict=True):
            clock.calibration = calibration
        self._predict()

    def predicted_ms(self, tier: int) -> float:
        """Predicted p99 of a whole run of the tier: inference plus decode, pre- and postprocessing and hand-over."""
        return self._predicted[tier]

    def learn(self, tier: int, inference_ms: float, overhead_ms: float) -> None:
        """Learn from one run: its inference, and all else from hand-over to result."""
        self._clocks[tier].add(inference_ms)
        self._overhead.add(overhead_ms)
        self._predict()

    def _predict(self) -> None:
        self._slowdown = self._clocks[self.level].slowdown or self._slowdown
        overhead_ms = usual_p99(self._overhead) if len(self._overhead) else 0.0
        self._predicted = [clock.p99_ms(self._slowdown) + overhead_ms for clock in self._clocks]

    def choose(self, left_ms: float, fresh_ms: float) -> int:
        """The tier for a frame.

        Args:
            left_ms: time left until the answer has to leave; may be short because the frame waited.
            fresh_ms: the time that a frame has which did not wait; decides the level.

        Returns:
            Index of the tier; the cheapest one where none fits.
        """
        self._frames_on_level += 1
        fitting_level = self._first_fit(fresh_ms, max(self.level, self.left_out))
        if fitting_level > self.level:
            soon = self._frames_on_level < 4 * self._step_up_after
            self._be_patient(self._patience * 2 if soon else self._step_up_after)
            self._step(fitting_level)
        elif self.level > 0 and self._predicted[self.level - 1] <= fresh_ms:
            self._fitting += 1
        else:
            self._fitting = 0
        return self._first_fit(left_ms, self.level)

    def _first_fit(self, left_ms: float, start: int) -> int:
        for tier in range(start, self.last):
            if self._predicted[tier] <= left_ms:
                return tier
        return self.last

    def _step(self, level: int) -> None:
        self.level = level
        self._fitting = self._probes = self._frames_on_level = 0
        if level > 0:  # what is above has not run for a while by the time it is asked for again
            for clock in self._clocks[:level]:
                clock.forget()

    def probe(self, fresh_ms: float, spare_worker: bool) -> int | None:
        """The tier to try now, outside any frame's answer, or None.

        Without a spare worker, only if a frame that arrives meanwhile could still wait for the probe and then run
        the cheapest tier within its time.
        """
        tier = self.level - 1
        if tier < self.left_out or self._fitting < self._patience:
            return None
        waiting_ms = 0.0 if spare_worker else self._predicted[self.last]
        return tier if self._predicted[tier] + waiting_ms <= fresh_ms else None

    def probed(self, tier: int, took_ms: float, fresh_ms: float) -> None:
        """A probe of `tier` took `took_ms`: after enough that fit, step up; after one that does not, be patient."""
        if tier != self.level - 1:
            return
        if took_ms > fresh_ms:
            self._be_patient(self._patience * 2)
            self._fitting = self._probes = 0
            return
        self._probes += 1
        if self._probes >= self.PROBES:
            self._step(tier)

    def _be_patient(self, frames: int) -> None:
        self._patience = min(frames, _MOST_PATIENT * self._step_up_after)
