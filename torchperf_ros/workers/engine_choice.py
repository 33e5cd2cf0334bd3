"""Which engine runs a model: the measured one, and eager unless another is clearly better."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchperf_ros.workers.calibration import Calibration

EAGER = "eager"
_TIE = 0.03
_TAIL = 1.25


def choose_engine(calibrations: Mapping[str, Calibration]) -> str:
    """The engine with the smallest median among those that beat eager, all measured in turns.

    `eager` if none does.

    An engine beats eager if its median is more than 3 % smaller (at a tie, eager: nothing to load, nothing
    to go stale) and its p99 at most 1.25 times eager's (a p99 scatters more than a median; an engine that
    is quick on average and late when it counts is no gain).
    """
    least, most = calibrations[EAGER].median_ms * (1 - _TIE), calibrations[EAGER].p99_ms * _TAIL
    better = [name for name, one in calibrations.items() if one.median_ms < least and one.p99_ms <= most]
    return min(better, key=lambda name: calibrations[name].median_ms, default=EAGER)


@dataclass(frozen=True)
class EngineChoice:
    """What engine `auto` has chosen for a tier on this machine, as it lies beside the packages.

    `timings_ms` are [median, p99] of all that were timed in turns, eager among them; `left_out` is why
    others were not.
    """

    engine: str
    timings_ms: dict[str, list[float]]
    left_out: dict[str, str] = field(default_factory=dict)

    def best_of(self, names: Collection[str]) -> str:
        """The chosen engine; of these names the one that would have been chosen, if it was timed."""
        if self.engine in names:
            return self.engine
        timed = {name: Calibration(*self.timings_ms[name]) for name in self.timings_ms if name in names}
        return choose_engine(timed)

    @property
    def words(self) -> str:
        """Which and by how much.

        The chosen engine first, the others from fast to slow, then why some are left out.

        `paced`: timed with a pause before each call, as a camera makes it.
        """
        order = sorted(self.timings_ms, key=lambda name: (name != self.engine, self.timings_ms[name][0]))
        parts = [", ".join(f"{name} {self.timings_ms[name][0]:.3g}" for name in order) + " ms (p50, paced)"]
        parts += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        return "; ".join(parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_choice(path: Path) -> EngineChoice | None:
    """The choice in a file; None where there is none that can be read: it is made anew."""
    try:
        choice = EngineChoice(**json.loads(path.read_text(encoding="utf-8")))
        _ = choice.words
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None
    return choice if {choice.engine, EAGER} <= choice.timings_ms.keys() else None
