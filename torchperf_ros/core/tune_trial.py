"""One trial of tuning: which way to run a model was tried, and what became of it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchperf_ros.core.build_options import BuildOptions

MEASURED, HOPELESS, REFUSED, CRASHED, HUNG = "measured", "hopeless", "refused", "crashed", "hung"
_BUCKET = "bucket"
_MS_PER_S = 1e3


@dataclass(frozen=True)
class Candidate:
    """One way to run a tier.

    Attributes:
        options: engine, mode, precision and the rest.
        threads: CPU threads of its operators, at least 1.
        shapes: policy for sizes that vary, see `ShapeOptions`; without such sizes it means nothing.
        bucket_width: of the policy bucket.
    """

    options: BuildOptions = field(default_factory=BuildOptions)
    threads: int = 1
    shapes: str = "dynamic"
    bucket_width: int = 32

    @property
    def label(self) -> str:
        """For tables: what is not the default, and the threads."""
        bucket = f" {_BUCKET} {self.bucket_width}" if self.shapes == _BUCKET else ""
        return f"{self.options.label}{bucket}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def changes(self) -> int:
        """How many options are not the default: the fewer, the simpler."""
        defaults = BuildOptions().as_dict()
        changed = [name for name, value in self.options.as_dict().items() if value != defaults[name]]
        return len(changed) + (self.shapes == _BUCKET)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Candidate":
        """What `as_dict` gave.

        Raises:
            TypeError, KeyError: not the fields of a candidate.
        """
        return cls(**{**values, "options": BuildOptions(**values["options"])})


@dataclass(frozen=True)
class Figures:
    """What was measured of a candidate, next to eager fp32 on the reference number of threads in the same process.

    Attributes:
        p50_ms, p95_ms, p99_ms: of one call of the model on inputs that lie on the device; p99 without isolated stalls
            of the machine, as the node's tiers are chosen by (`tier_ladder.usual_p99`).
        max_ms: the longest call, stalls included.
        eager_p50_ms, eager_p99_ms: of the reference, sampled in turns with it.
        samples: how many of each; below 100, p99 lies between the two longest.
        compile_s: seconds to compile, 0 for eager.
        memory_mb: most memory (10^6 bytes) that the process held, resident on the CPU, allocated on CUDA; the eager
            model and, on the CPU, torch itself and the compiler are in it.
        relative_l2, cosine, max_error: worst distance of its outputs from the reference's, see `Parity`.
    """

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    eager_p50_ms: float
    eager_p99_ms: float
    samples: int
    compile_s: float
    memory_mb: float
    relative_l2: float
    cosine: float
    max_error: float

    @property
    def break_even_frames(self) -> float:
        """Frames after which compiling has paid: compile seconds over seconds saved per frame, by medians.

        0 where nothing was compiled, infinite where it was and nothing is saved.
        """
        saved_s = (self.eager_p50_ms - self.p50_ms) / _MS_PER_S
        if not self.compile_s:
            return 0.0
        return self.compile_s / saved_s if saved_s > 0 else math.inf


@dataclass(frozen=True)
class Trial:
    """What became of a candidate.

    Attributes:
        tier: the tier that it ran.
        candidate: what was tried.
        outcome: measured; hopeless (ended after a first look); refused (parity, or it cannot be made); crashed; hung.
        reason: why it is not `measured`, in one line or more.
        figures: of `measured`, and of the first look of `hopeless`; None otherwise.
        took_s: seconds from start to end of its process.
        timeout_s: how long it was allowed to take.
    """

    tier: str
    candidate: Candidate
    outcome: str
    reason: str = ""
    figures: Figures | None = None
    took_s: float = 0.0
    timeout_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trial":
        """What `as_dict` gave.

        Raises:
            TypeError, KeyError: not the fields of a trial.
        """
        figures = values["figures"]
        return cls(
            **{
                **values,
                "candidate": Candidate.from_dict(values["candidate"]),
                "figures": None if figures is None else Figures(**figures),
            }
        )
