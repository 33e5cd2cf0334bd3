"""A trial: one way to run a tier's model, and what was measured of it. Nothing here needs torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchperf_ros.settings.build_options import BuildOptions

EAGER, BUCKET = "eager", "bucket"
_MS_PER_S = 1e3


@dataclass(frozen=True)
class Facts:
    """What decides which candidates make sense, from a process that has loaded the adapter on the device.

    Attributes:
        tiers: those that were named, else those that the adapter builds.
        identity: hash of weights, code, inputs and what they run on, of every tier; results under another
            say nothing.
        changing: why no package can be kept, where a build has other weights than the one before; ""
            otherwise.
        threads: CPU threads that the node uses by default, the reference's.
        left_out: precision or layout -> why it does nothing, or nothing good, for this model here.
        ranges: smallest and largest value of each size that varies.
        has_task: whether the adapter has a training task, which judges how accurate a candidate is.
        load_s: seconds that such a process took to start and load the models.
    """

    identity: str
    cuda: bool
    machine: str
    threads: int
    cores: int
    tiers: tuple[str, ...] = ()
    changing: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    ranges: tuple[tuple[int, int], ...] = ()
    has_task: bool = False
    load_s: float = 0.0


@dataclass(frozen=True)
class TuneCandidate:
    """One way to run a tier.

    Attributes:
        shapes: policy for sizes that vary, see `ShapeOptions`; without such sizes it means nothing.
    """

    options: BuildOptions = field(default_factory=BuildOptions)
    threads: int = 1
    shapes: str = "dynamic"
    bucket_width: int = 32

    @property
    def label(self) -> str:
        """For tables: what is not the default, and the threads."""
        bucket = f" {BUCKET} {self.bucket_width}" if self.shapes == BUCKET else ""
        return f"{self.options.label}{bucket}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def changes(self) -> int:
        """How many options are not the default: the fewer, the simpler."""
        defaults = BuildOptions().as_dict()
        changed = [name for name, value in self.options.as_dict().items() if value != defaults[name]]
        return len(changed) + (self.shapes == BUCKET)

    @property
    def is_eager(self) -> bool:
        return self.options.engine == EAGER


@dataclass(frozen=True)
class Accuracy:
    """The figures of the adapter's training task for a candidate and for eager fp32, on the same held-out examples.

    Attributes:
        name: of the figure, the first of `Task.judge`.
        value, eager: of the candidate, and of eager fp32 of the same tier.
        judged: how many examples were asked for.
    """

    name: str
    value: float
    eager: float
    judged: int
    higher_is_better: bool = True

    @property
    def merit(self) -> float:
        """The figure, or less it where lower is better: of two the higher is better."""
        return self.value if self.higher_is_better else -self.value

    @property
    def loss(self) -> float:
        """By how much it is worse than eager fp32, below 0 if it is better."""
        return self.eager - self.value if self.higher_is_better else self.value - self.eager


@dataclass(frozen=True)
class TrialFigures:
    """What was measured of a candidate, next to eager fp32 on the reference number of threads in the same process.

    Attributes:
        p50_ms, p95_ms, p99_ms: of one call of the model on inputs that lie on the device; p99 without isolated stalls
            of the machine, as the node's tiers are chosen by (`tier_ladder.usual_p99`).
        max_ms: the longest call, stalls included.
        eager_p50_ms, eager_p99_ms: of the reference, on the adapter's own example inputs, sampled in turns
        with it. least_share, most_share: p50 over the reference's, in the best and in the worst fifth of
        the measurement.
        samples: how many of each; below 100, p99 lies between the two longest.
        cold_start_s, compile_s: from the start of the process to the first answer; compiling, 0 for eager.
        memory_mb: most memory (10^6 bytes) that the process held, resident on the CPU, allocated on CUDA.
        relative_l2, max_error: worst distance of its outputs from the reference's, see `Parity`.
        score: of its answers, where that is why they are good enough.
        accuracy: None where nothing judges it.
    """

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    eager_p50_ms: float
    eager_p99_ms: float
    least_share: float
    most_share: float
    samples: int
    cold_start_s: float
    compile_s: float
    memory_mb: float
    relative_l2: float
    max_error: float
    score: float | None = None
    accuracy: Accuracy | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialFigures":
        """What `asdict` gave; a `TypeError` where these are not the fields of figures."""
        accuracy = values.get("accuracy")
        return cls(**{**values, "accuracy": accuracy and Accuracy(**accuracy)})

    @property
    def break_even_frames(self) -> float:
        """Frames after which compiling has paid: compile seconds over seconds saved per frame, by medians.

        0 where nothing was compiled, infinite where it was and nothing is saved.
        """
        saved_s = (self.eager_p50_ms - self.p50_ms) / _MS_PER_S
        if not self.compile_s:
            return 0.0
        return self.compile_s / saved_s if saved_s > 0 else math.inf


class TrialOutcome:
    """What may become of a candidate, see `TuneTrial`."""

    MEASURED, REFUSED, CRASHED, HUNG = "measured", "refused", "crashed", "hung"


@dataclass(frozen=True)
class TuneTrial:
    """What became of a candidate.

    Attributes:
        outcome: measured; refused (parity, or it cannot be made); crashed; hung.
        reason: why it is not `measured`, in one line or more.
        figures: of `measured`; None otherwise.
        took_s, timeout_s: seconds from start to end of its process, and how many it was allowed to take.
    """

    tier: str
    candidate: TuneCandidate
    outcome: str
    reason: str = ""
    figures: TrialFigures | None = None
    took_s: float = 0.0
    timeout_s: float = 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TuneTrial":
        """What `asdict` gave; a `TypeError` or `KeyError` where these are not the fields of a trial."""
        figures = values["figures"] and TrialFigures.from_dict(values["figures"])
        return cls(**{**values, "candidate": candidate_of(values["candidate"]), "figures": figures})


def candidate_of(values: Mapping[str, Any]) -> TuneCandidate:
    """What `asdict` gave; a `TypeError` or `KeyError` where these are not the fields of a candidate."""
    return TuneCandidate(**{**values, "options": BuildOptions(**values["options"])})
