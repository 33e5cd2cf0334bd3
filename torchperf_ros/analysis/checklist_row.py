"""One line of the checklist: an optimisation, what was measured of it, and what that means."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from torchperf_ros.analysis.gain import Gain, gain, slower
from torchperf_ros.analysis.parameter_snippet import yaml_value
from torchperf_ros.worker.parity import Parity
from torchperf_ros.worker.stopwatch import Timing

WORTH: Final = 0.02
"""A parameter is changed for no less than this share of the median time."""


class Advice(Enum):
    """What to do about an optimisation."""

    TURN_ON = "turn on"
    KEEP = "keep on"
    TURN_OFF = "turn off"
    LEAVE_OFF = "leave off"
    NOISE = "within noise"
    REFUSED = "refused"
    NONE = ""


@dataclass(frozen=True)
class Row:
    """One optimisation.

    Attributes:
        name: what it is called.
        parameter: the node's or the stage's parameter, "" where there is none to set.
        value, other: the parameter's value with it and without it, for this tier.
        on: whether it is on now.
        why_not: why it does not apply here, "" where it does.
        skipped: why it was not measured although it applies.
        without, with_: measured in the same rounds; None where nothing was.
        noise: by how much two copies of the same thing differed in those rounds, as a share.
        parity: how far its outputs are from those of eager fp32; None where they were not compared.
        refused: why its outputs are wrong, or why it cannot run.
        remark: what decides beside the figures; turns TURN_ON and KEEP into LEAVE_OFF and TURN_OFF.
    """

    name: str
    parameter: str
    value: Any
    other: Any
    on: bool
    why_not: str = ""
    skipped: str = ""
    without: Timing | None = None
    with_: Timing | None = None
    noise: float = 0.0
    parity: Parity | None = None
    refused: str = ""
    remark: str = ""
    gain: Gain | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Find the gain."""
        if self.without is not None and self.with_ is not None and self.without is not self.with_:
            object.__setattr__(self, "gain", gain(self.without, self.with_))

    @property
    def threshold(self) -> float:
        """Share of the time below which a difference is none."""
        return max(self.noise, WORTH)

    @property
    def advice(self) -> Advice:
        """What to do: a gain counts where all of its interval is above the noise and worth a change."""
        if self.why_not or self.refused:
            no = Advice.REFUSED if self.refused else Advice.NONE
            return Advice.TURN_OFF if self.on else no
        if self.gain is None or self.skipped:
            return Advice.NONE
        if self.gain.low > self.threshold and not self.remark:
            return Advice.KEEP if self.on else Advice.TURN_ON
        if self.gain.low > self.threshold or self.gain.high < -self.threshold:
            return Advice.TURN_OFF if self.on else Advice.LEAVE_OFF
        return Advice.NOISE

    @property
    def verdict(self) -> str:
        """The advice in words, with its reason."""
        advice = self.advice
        reason = {
            Advice.TURN_ON: f"`{self.setting}`" if self.parameter else "better than each alone",
            Advice.REFUSED: self.refused,
            Advice.TURN_OFF: self._why_off(),
            Advice.LEAVE_OFF: self._why_off(),
            Advice.NOISE: f"{100 * self.threshold:.1f} %",
        }.get(advice, "")
        if advice is Advice.NONE:
            return self.skipped
        return f"{advice.value}: {reason}" if reason else advice.value

    @property
    def setting(self) -> str:
        """The parameter as one sets it for this tier."""
        return f"{self.parameter}: {yaml_value([self.value] if self.parameter == 'precision' else self.value)}"

    def _why_off(self) -> str:
        if self.why_not or self.refused:
            return self.why_not or self.refused
        if self.gain is not None and self.gain.saved < 0:
            return slower(self.gain.saved)
        return self.remark

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times in ms, gains as shares of the median without."""
        return {
            "name": self.name,
            "parameter": self.parameter,
            "value": self.value,
            "on_now": self.on,
            "applies": not self.why_not,
            "why_not": self.why_not,
            "without": None if self.without is None else timing_dict(self.without),
            "with": None if self.with_ is None else timing_dict(self.with_),
            "gain": None if self.gain is None else vars(self.gain),
            "noise": self.noise,
            "parity": None if self.parity is None else self.parity.as_dict(),
            "refused": self.refused,
            "advice": self.advice.value,
            "verdict": self.verdict,
        }


def keep_one(rows: Sequence[Row]) -> list[Row]:
    """Of values of the same parameter that all gain, the best stays; the others' verdicts say which that is.

    What is on now goes only for one that is faster by more than the noise.
    """
    good = [row for row in rows if row.advice in (Advice.TURN_ON, Advice.KEEP)]
    if not good:
        return list(rows)
    best = min(good, key=_median_ms)
    now = next((row for row in good if row.on), best)
    if best is not now and gain(_with(now), _with(best)).low <= best.threshold:
        best = now
    return [replace(row, remark=f"{best.name} gains more") if row in good and row is not best else row for row in rows]


def changes(rows: Sequence[Row]) -> dict[str, Any]:
    """Parameter -> value, of what the verdicts change."""
    off = {row.parameter: row.other for row in rows if row.parameter and row.advice is Advice.TURN_OFF}
    on = {row.parameter: row.value for row in rows if row.parameter and row.advice is Advice.TURN_ON}
    return off | on


def _with(row: Row) -> Timing:
    assert row.with_ is not None
    return row.with_


def _median_ms(row: Row) -> float:
    return _with(row).median_ms


def timing_dict(timing: Timing) -> dict[str, float]:
    """For JSON: in ms."""
    return {
        "p50_ms": timing.median_ms,
        "p95_ms": timing.p95_ms,
        "p99_ms": timing.p99_ms,
        "max_ms": timing.max_ms,
        "samples": len(timing.times_ms),
        "calls_per_sample": timing.inner,
    }
