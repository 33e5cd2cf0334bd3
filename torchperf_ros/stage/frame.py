"""A frame: one trigger message on its way through a stage, and its answer."""

import math
from dataclasses import dataclass, field

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.settings.config import StageConfig

_LEAST_WORTH_A_WORD_MS = 0.05
# A stamp further than this from the ROS clock says nothing about the frame's age (DESIGN: 10 s).
USABLE_AGE_MS = 10_000.0


def stamp_age_ms(stamp_ns: int, ros_now_ns: int) -> float:
    """ROS time since the stamp in ms, negative for a stamp in the future.

    NaN where it is unknown: for a zero stamp, and while ROS time is zero, which it is before the first
    `/clock`.
    """
    return (ros_now_ns - stamp_ns) / NS_PER_MS if stamp_ns and ros_now_ns else math.nan


def usable_age_ms(age_ms: float) -> float:
    """The age if it can be one (0 to 10 s); otherwise 0: such a frame counts from its receipt."""
    return age_ms if 0.0 <= age_ms <= USABLE_AGE_MS else 0.0


@dataclass(slots=True)
class Origin:
    """The first stage's trigger that a frame descends from, for the end-to-end latency."""

    received_ns: int
    age_ms: float

    def latency_ms(self, published_ns: int) -> float:
        """From the trigger's stamp (from its receipt where the stamp is unusable) to `published_ns`."""
        return usable_age_ms(self.age_ms) + (published_ns - self.received_ns) / NS_PER_MS


@dataclass(slots=True)
class Frame:
    """One trigger message.

    Attributes:
        data: CDR bytes of the trigger, maybe in the stage's ring already; None if the stage before had none
            to give.
        budget_ms: its budget, counted as `budget_from` says.
        stale: its deadline had passed when its turn came, so it is answered at once.
        inputs_since_ns: receipt by the clock that waiting for synchronised inputs is measured by.
        received_ros_ns: ROS time of the receipt, 0 if unknown.
    """

    seq: int  # number of the frame in its stage, counted from 0 over every frame received
    data: bytes | memoryview | None
    stamp_ns: int  # `header.stamp`, 0 if none
    age_ms: float  # ROS time from stamp to receipt, NaN if unknown
    received_ns: int  # monotonic receipt
    deadline_ns: int  # monotonic time by which the answer is published
    origin: Origin  # what the end-to-end latency counts from
    refusal: str = ""  # why the frame cannot be run at all, empty if it can
    scene: int = 0  # index of the scene that it is answered for
    budget_ms: float = math.nan
    stale: bool = False
    inputs_since_ns: int = 0
    received_ros_ns: int = 0

    @property
    def gone_ms(self) -> float:
        """How much of its budget had passed at its receipt: by its stamp, or in the stage before."""
        return self.budget_ms - (self.deadline_ns - self.received_ns) / NS_PER_MS

    @property
    def comes_from_a_stage(self) -> bool:
        return self.origin.received_ns != self.received_ns

    def gone_words(self, waited_ms: float) -> str:
        """For people.

        How much of its budget had passed after this wait, and in which part, as far as stamps show it.
        """
        parts, gone_ms = [], self.gone_ms
        if gone_ms >= _LEAST_WORTH_A_WORD_MS and self.comes_from_a_stage:
            parts.append(f"{gone_ms:.1f} ms in the stages before")
        elif gone_ms >= _LEAST_WORTH_A_WORD_MS:
            why = "the camera's latency, its host's clock is behind this one's, or its publisher kept it"
            parts.append(f"{gone_ms:.1f} ms by its stamp when it was received ({why})")
        if waited_ms >= _LEAST_WORTH_A_WORD_MS:
            parts.append(f"{waited_ms:.1f} ms waiting for its turn")
        total_ms = gone_ms + waited_ms
        return (
            f"{total_ms:.1f} ms of its budget of {self.budget_ms:g} ms had passed at its turn:"
            f" {', '.join(parts)}"
        )

    def age_at_ms(self, now_ns: int) -> float:
        """Age at a later monotonic time; NaN if it was unknown at receipt."""
        return self.age_ms + (now_ns - self.received_ns) / NS_PER_MS

    def ros_ns(self, now_ns: int) -> int | None:
        """ROS time at a monotonic time soon after the receipt, without asking a clock.

        None if the age is unknown.
        """
        age_ms = self.age_at_ms(now_ns)
        return None if math.isnan(age_ms) else self.stamp_ns + round(age_ms * NS_PER_MS)


@dataclass(slots=True)
class StepTimes:
    """Durations inside the worker in ms; NaN where the step was not reached."""

    decode_ms: float = math.nan
    preprocess_ms: float = math.nan
    inference_ms: float = math.nan
    postprocess_ms: float = math.nan

    @property
    def total_ms(self) -> float:
        return self.decode_ms + self.preprocess_ms + self.inference_ms + self.postprocess_ms


@dataclass(slots=True)
class Answer:
    """What was published for a frame, and why.

    Attributes:
        offset, length: the frame's inputs in the stage's ring; length 0: they are not there.
        step: of an anytime model, the step whose outputs were published; 0 for others.
        missing_inputs: synchronised inputs without a message that fits: bit n is the adapter's input n.
    """

    frame: Frame  # the frame that was answered
    outcome: Outcome  # on time, or the reason why not
    # what was published instead of its own result; on time, only by the emergency lane
    fallback: Fallback | None
    # for people: one line, then a traceback; empty for a frame on time whose output was accepted
    reason: str
    tier: int  # index of the tier whose result was used or waited for; -1 if none was started
    # from receipt to the start of the frame's turn (time in the mailbox), and for inputs to come
    wait_ms: float
    total_ms: float  # from receipt to the published answer
    budget_ms: float  # the stage's budget, counted as `budget_from` says
    lateness_ms: float  # published after (positive) or before (negative) the deadline
    published_ns: int  # monotonic time at which the answer was out
    steps: StepTimes = field(default_factory=StepTimes)  # times inside the worker that gave the result
    payload: bytes | None = None  # the output's bytes, None if nothing was published
    # of the model's inputs, see `protocol.Response`; empty where no worker has answered
    shapes: bytes = b""
    offset: int = 0
    length: int = 0
    profiled: bool = False  # whether its worker was recording a profile meanwhile, which takes time
    check: GuardVerdict | None = None  # what the guard made of the output; None: the stage has no guard
    step: int = 0
    missing_inputs: int = 0


class Mailbox:
    """Holds at most one frame that waits for its turn."""

    def __init__(self) -> None:
        self.waiting: Frame | None = None
        self.superseded = 0  # frames replaced by a newer one before their turn

    def put(self, frame: Frame | None) -> None:
        """Keep `frame`, or none; a frame that was waiting is superseded."""
        if self.waiting is not None:
            self.superseded += 1
        self.waiting = frame

    def take(self, now_ns: int) -> Frame | None:
        """The waiting frame, whose turn comes now; it is stale if its deadline has passed."""
        frame, self.waiting = self.waiting, None
        if frame is not None:
            frame.stale = frame.deadline_ns <= now_ns
        return frame


def admit(
    config: StageConfig,
    data: bytes | memoryview | None,
    stamp_ns: int,
    *,
    received_ns: int,
    ros_now_ns: int,
    upstream: Frame | None = None,
    refusal: str = "",
    budget_ms: float | None = None,
) -> Frame:
    """Make the frame of a trigger message; its number comes later.

    The budget counts from the receipt, or from the stamp if so configured and the stamp is usable. Behind
    another stage it counts from when the frame was due: received, or the deadline there if that was
    earlier, so that end to end no more than the sum of the budgets is taken. Behind a frame that was stale
    there, it counts from the receipt: that sum was used up before anything could be done, and this stage
    still has its whole budget.

    Args:
        config: the stage's configuration.
        data: CDR bytes; None where the stage before has nothing to hand over.
        stamp_ns: `header.stamp`, 0 if none.
        received_ns: monotonic receipt.
        ros_now_ns: ROS time of the receipt.
        upstream: the frame of the stage before that `data` is the output of.
        refusal: why the message cannot be used, if that is known already.
        budget_ms: its budget; None: the stage's.
    """
    age_ms = stamp_age_ms(stamp_ns, ros_now_ns)
    budget_ms = config.budget_ms if budget_ms is None else budget_ms
    counts_from_ns, counted_age_ms = received_ns, 0.0
    if upstream is None or not upstream.stale:
        if config.budget_from == "stamp":
            counted_age_ms = usable_age_ms(age_ms if upstream is None else upstream.age_at_ms(received_ns))
        if upstream is not None and not counted_age_ms:
            counts_from_ns = min(received_ns, upstream.deadline_ns)
    if data is not None and len(data) > config.max_frame_bytes:
        refusal = (
            f"message of {len(data)} bytes; the parameter max_frame_bytes, which may be raised, is"
            f" {config.max_frame_bytes}"
        )
    origin = Origin(received_ns, age_ms) if upstream is None else upstream.origin
    deadline_ns = counts_from_ns + round((budget_ms - counted_age_ms) * NS_PER_MS)
    return Frame(
        -1,
        data,
        stamp_ns,
        age_ms,
        received_ns,
        deadline_ns,
        origin,
        refusal,
        budget_ms=budget_ms,
        received_ros_ns=ros_now_ns,
    )
