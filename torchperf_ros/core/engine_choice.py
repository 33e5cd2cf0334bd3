"""Which engine runs a model: the measured one, and eager unless another is clearly better."""

from collections.abc import Mapping

from torchperf_ros.core.tier_ladder import Calibration

EAGER = "eager"
_TIE = 0.05
_TAIL = 1.25


def choose_engine(calibrations: Mapping[str, Calibration]) -> str:
    """The engine with the smallest median among those that beat eager.

    An engine beats eager if its median is more than 5 % smaller (at a tie, eager: nothing to load, nothing to go
    stale, and 5 % is what two measurements of the same thing differ by) and its p99 at most 1.25 times eager's
    (a p99 scatters more than a median; an engine that is quick on average and late when it counts is no gain).

    Args:
        calibrations: engine -> its calibration, all measured in turns with each other; `eager` among them.

    Returns:
        A name out of `calibrations`; `eager` where none beats it.

    Raises:
        ValueError: eager was not measured.
    """
    if EAGER not in calibrations:
        msg = f"engines {sorted(calibrations)} cannot be compared without {EAGER!r}"
        raise ValueError(msg)
    eager = calibrations[EAGER]
    better = [
        name
        for name, found in calibrations.items()
        if found.median_ms < eager.median_ms * (1 - _TIE) and found.p99_ms <= eager.p99_ms * _TAIL
    ]
    return min(better, key=lambda name: calibrations[name].median_ms, default=EAGER)
