"""What goes into the ring with a frame: its trigger, and of each other input one message.

That is the latest one, or for a synchronised input the one whose stamp fits the trigger's; a frame may wait
for it.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final, Generic, TypeVar

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_US, Clock
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import has_header
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.safety.stop_output import PATH, can_stop
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.settings.stage_options import SyncRule, check_sync
from torchperf_ros.stage.frame import Frame, stamp_age_ms
from torchperf_ros.stage.stage_guard import StageGuard
from torchperf_ros.stage.turn import Turn
from torchperf_ros.workers.control import Description
from torchperf_ros.workers.frame_ring import FrameRing, InputBytes

# Messages of an input that are kept: the last ones received. At 30 Hz they reach back 0.27 s.
KEPT: Final = 8
# After so many frames in a row without it nothing waits for an input.
#
# One that is lost costs ten waits in all.
MOST_MISSES: Final = 10
_SKEWS = 128

Message = TypeVar("Message")


class SyncedInput(Generic[Message]):
    """One input: its last messages, which of them fits the frame, and how often one did.

    Attributes:
        matched, missing: frames with a message whose stamp fitted, and without.
        waited: frames that waited for it, `waited_ms` together.
        unstamped: messages with the stamp 0; they fit no frame.
        skews_ms: of the last 128 matches, the message's stamp less the one that was wanted.
        missing_skew_ms: the same of the nearest message when one was missing last; NaN where there was
            none.
        until_ns: the frame waits for it until then; 0: it does not.
    """

    def __init__(self, rule: SyncRule) -> None:
        self.rule = rule
        self.matched = self.missing = self.waited = self.unstamped = self.until_ns = 0
        self.waited_ms, self.missing_skew_ms = 0.0, math.nan
        self.skews_ms: deque[float] = deque(maxlen=_SKEWS)
        self._offset_ns, self._slop_ns = round(rule.offset_ms * NS_PER_MS), round(rule.slop_ms * NS_PER_MS)
        self._kept: dict[int, Message] = {}  # by stamp, in the order of their receipt
        self._misses = 0  # in a row
        self._wanted_ns: int | None = None  # the stamp that the frame wants; None: its trigger has none
        # from when until when it could be waited for, whether it is or not
        self._since_ns = self._in_time_ns = 0

    @property
    def is_lost(self) -> bool:
        """Whether frames do not wait for it any more: it was missing too often in a row."""
        return self._misses >= MOST_MISSES

    def take(self, stamp_ns: int, message: Message, now_ns: int) -> None:
        """Keep a message.

        Of two with one stamp the later received counts. It may be the one that is waited for.
        """
        if stamp_ns <= 0:
            self.unstamped += 1
            return
        self._kept.pop(stamp_ns, None)
        self._kept[stamp_ns] = message
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        if now_ns < self._in_time_ns and self.nearest() is not None:
            # it is there again, also where the frame has not waited for it
            self._in_time_ns = self._misses = 0
            self._over(now_ns)

    def begin(self, trigger_ns: int, now_ns: int, waited_ms: float, room_ms: float) -> None:
        """A frame asks for the message that fits its trigger.

        Args:
            trigger_ns: stamp of the trigger, 0 if it has none.
            now_ns: as `take` and `settle` have it.
            waited_ms: time since the trigger's receipt.
            room_ms: time that the frame can spare for waiting.
        """
        self._wanted_ns = trigger_ns + self._offset_ns if trigger_ns > 0 else None
        left_ms = min(self.rule.wait_ms - waited_ms, room_ms)
        could_wait = left_ms > 0 and self._wanted_ns is not None and self.nearest() is None
        self._since_ns, self._in_time_ns = now_ns, now_ns + round(left_ms * NS_PER_MS) if could_wait else 0
        self.until_ns = 0 if self.is_lost else self._in_time_ns

    def settle(self, now_ns: int) -> Message | None:
        """The message that the frame gets, and count what became of it.

        None: there is none, it is missing.
        """
        self._over(now_ns)
        stamp_ns = self.nearest()
        if stamp_ns is None:
            self.missing += 1
            self._misses += 1
            self.missing_skew_ms = min(
                (self._skew_ms(one) for one in self._kept), key=abs, default=math.nan
            )
            return None
        self.matched += 1
        self._misses = 0
        self.skews_ms.append(self._skew_ms(stamp_ns))
        return self._kept[stamp_ns]

    def nearest(self) -> int | None:
        """The stamp nearest to the one that the frame wants, of two the later received.

        None: none is near.
        """
        wanted_ns = self._wanted_ns
        if wanted_ns is None:
            return None
        stamp_ns = min(reversed(self._kept), key=lambda one: abs(one - wanted_ns), default=None)
        return stamp_ns if stamp_ns is not None and abs(stamp_ns - wanted_ns) <= self._slop_ns else None

    def _over(self, now_ns: int) -> None:
        if self.until_ns:
            self.waited += 1
            self.waited_ms += (now_ns - self._since_ns) / NS_PER_MS
            self.until_ns = 0

    def _skew_ms(self, stamp_ns: int) -> float:
        return math.nan if self._wanted_ns is None else (stamp_ns - self._wanted_ns) / NS_PER_MS

    @property
    def why_missing(self) -> str:
        """Why it was missing the last time, in words; "" if it never was."""
        if not self.missing:
            return ""
        if not math.isnan(self.missing_skew_ms):
            return (
                f"the nearest message was {self.missing_skew_ms:+.1f} ms off, slop is"
                f" {self.rule.slop_ms:g} ms"
            )
        if self._kept:
            return "the trigger had no stamp"
        return f"no message with a stamp has come, {self.unstamped} without one"

    @property
    def skew_p50_ms(self) -> float:
        """Median distance of the last matches from what was wanted; NaN before the first."""
        return median(map(abs, skews)) if (skews := tuple(self.skews_ms)) else math.nan

    @property
    def skew_max_ms(self) -> float:
        return max(map(abs, tuple(self.skews_ms)), default=math.nan)


class InputSync(Generic[Message]):
    """The synchronised inputs of a stage, by index among its adapter's.

    Times are of one clock, any that does not go back. Nothing here takes a lock.

    Attributes:
        inputs: empty before `bind`.
        news: alerts about inputs that are lost, are back, or have no stamps; for who publishes them to take
            away.
    """

    def __init__(self, stage: str, rules: Sequence[SyncRule]) -> None:
        self.inputs: dict[int, SyncedInput[Message]] = {}
        self.news: deque[Alert] = deque()
        self._stage, self._rules = stage, rules
        self._unstamped: set[str] = set()  # whose missing stamps were reported

    def bind(self, inputs: Sequence[tuple[str, str]]) -> None:
        """Take the topics and message types of the adapter's inputs, the trigger first, when they are known.

        Raises:
            ConfigError: a rule is for no such input, or for one whose messages have no stamp.
        """
        check_sync(self._stage, self._rules, [(topic, has_header(kind)) for topic, kind in inputs])
        topics = [topic for topic, _ in inputs]
        self.inputs = self.inputs or {topics.index(rule.topic): SyncedInput(rule) for rule in self._rules}

    def take(self, index: int, stamp_ns: int, message: Message, now_ns: int) -> bool:
        """Keep a message of an input; False if it is not synchronised."""
        one = self.inputs.get(index)
        if one is not None:
            was_lost = one.is_lost
            one.take(stamp_ns, message, now_ns)
            self._tell(one, was_lost=was_lost)
            self._tell_unstamped(one.rule.topic, stamp_ns)
        return one is not None

    def begin(self, trigger_ns: int, now_ns: int, waited_ms: float, room_ms: float) -> None:
        """A frame asks for its inputs, see `SyncedInput.begin`.

        `until_ns` is then the time until which it waits.
        """
        for one in self.inputs.values():
            one.begin(trigger_ns, now_ns, waited_ms, room_ms)

    @property
    def until_ns(self) -> int:
        """Until when the frame waits for inputs that are missing and may still come; 0: for none."""
        return max((one.until_ns for one in self.inputs.values()), default=0)

    def settle(self, trigger_ns: int, now_ns: int, latest: dict[int, Message]) -> int:
        """Put the frame's messages into `latest`, by index.

        Returns the missing: bit n is the adapter's input n.
        """
        missing = 0
        for index, one in self.inputs.items():
            was_lost, message = one.is_lost, one.settle(now_ns)
            self._tell(one, was_lost=was_lost)
            if message is None:
                missing |= 1 << index
                latest.pop(index, None)
            else:
                latest[index] = message
        self._tell_unstamped("trigger", trigger_ns)
        return missing

    def _tell_unstamped(self, what: str, stamp_ns: int) -> None:
        if stamp_ns <= 0 and what not in self._unstamped:
            self._unstamped.add(what)
            self._alert(
                Level.WARN, f"input without stamps ({what})", "messages with the stamp 0 fit no others", {}
            )

    def _tell(self, one: SyncedInput[Message], *, was_lost: bool) -> None:
        """Leave an alert where an input is lost, or is back."""
        if one.is_lost is was_lost:
            return
        name = f"input missing ({one.rule.topic})"
        values = {"matched": str(one.matched), "missing": str(one.missing), "unstamped": str(one.unstamped)}
        if one.is_lost:
            waits = "; frames do not wait for it until it comes in time again" if one.rule.wait_ms else ""
            text = f"missing in {MOST_MISSES} frames in a row, {one.why_missing}{waits}"
            self._alert(Level.WARN, name, text, values)
        else:
            self._alert(Level.OK, name, "is there again", values)

    def _alert(self, level: Level, name: str, text: str, values: dict[str, str]) -> None:
        self.news.append(Alert(level, f"{self._stage}: {name}", text, values, once=True))


def aged(item: InputBytes, received_ns: int, frame: Frame) -> InputBytes:
    """Another input than the trigger as it goes into the frame's record, with its age at the frame's receipt.

    The age is ROS time, which may run faster than the monotonic clock; the latter stands in for it where
    the frame's stamp does not give it.

    Args:
        item: the newest message, with its age at its own receipt; it ages also when no newer one comes.
        received_ns: that receipt, monotonic.
        frame: the frame.
    """
    waited_ns, ros_ns = frame.received_ns - received_ns, frame.ros_ns(frame.received_ns)
    age_ms = item.age_ms + waited_ns / NS_PER_MS if ros_ns is None else stamp_age_ms(item.stamp_ns, ros_ns)
    return InputBytes(item.index, item.stamp_ns, age_ms, item.data, max(waited_ns, 0) // NS_PER_US)


class Inputs:
    """A stage's inputs, and the frames that were written into its ring; every call holds the stage's lock.

    Attributes:
        latest: the message of each other input than the trigger for the next frame, and its monotonic
            receipt.
        sync: which messages of other inputs fit a trigger; None where the latest of each does.
        started: frames that were written so far.
        has_clock: whether waiting for inputs is measured by a clock of its own.
    """

    def __init__(self, config: StageConfig, clock: Clock | None = None) -> None:
        """Nothing has come. `clock` measures waiting for inputs; None: the stage's own clock does."""
        self._config, self._clock, self.has_clock = config, clock, clock is not None
        self.latest: dict[int, tuple[InputBytes, int]] = {}
        self.started = 0
        has_rules = bool(config.sync)
        self.sync = InputSync[tuple[InputBytes, int]](config.name, config.sync) if has_rules else None

    def wanted(self, description: Description) -> list[tuple[int, str, str]]:
        """Index, topic and type of the adapter's inputs, the trigger first, then of scenes and guard.

        Raises:
            ConfigError: the stage has a guard and publishes something else than a path, an input cannot be
                synchronised, or `topics` names none of the adapter's.
        """
        config, inputs = self._config, description.inputs
        if config.guard is not None and not can_stop(description.output):
            what = f"the stage publishes {description.output}, and a guard checks {PATH}"
            raise ConfigError(
                f"parameter {config.name}.guard.act: {what}; leave it empty, and shadow as well"
            )
        if self.sync is not None:
            self.sync.bind(inputs)
        names = [topic for topic, _ in inputs]
        if unknown := dict(config.topics).keys() - set(names):
            what = f"the adapter has no input {min(unknown)}; it has: {', '.join(names)}"
            raise ConfigError(f"parameter {config.name}.topics: {what}")
        own = [(index, config.topic_of(topic), kind) for index, (topic, kind) in enumerate(inputs)]
        return [*own, *config.situation_inputs, *StageGuard.inputs(config)]

    def now_ns(self, now_ns: int) -> int:
        """The time by the clock that waiting is measured by; `now_ns` is the stage's."""
        return now_ns if self._clock is None else self._clock()

    def take(self, message: InputBytes, received_ns: int, input_ns: int) -> bool:
        """Keep a message of another input; whether a frame may have waited for it.

        `input_ns` is the receipt by the clock that waiting is measured by.
        """
        kept = message, received_ns
        if self.sync is not None and self.sync.take(message.index, message.stamp_ns, kept, input_ns):
            return True
        self.latest[message.index] = kept
        return False

    def wait_until_ns(self, turn: Turn, now_ns: int, input_ns: int, cheapest_ms: float) -> int:
        """Until when a frame waits for its inputs, by the clock of these.

        0: it waits no more, and `latest` has the messages that fit. It leaves `cheapest_ms` for a run. A
        newer frame waits in the mailbox meanwhile, as behind any frame that is being answered.
        """
        sync, frame = self.sync, turn.frame
        if sync is None:
            return 0
        has_waited = turn.inputs_until_ns > 0
        if not has_waited:
            waited_ms = (input_ns - frame.inputs_since_ns) / NS_PER_MS
            sync.begin(frame.stamp_ns, input_ns, waited_ms, turn.left_ms(now_ns) - cheapest_ms)
        until_ns = sync.until_ns
        turn.inputs_until_ns = until_ns if until_ns > input_ns else 0
        if turn.inputs_until_ns:
            return until_ns
        if has_waited:
            turn.wait_ms = (now_ns - frame.received_ns) / NS_PER_MS
        turn.missing_inputs = sync.settle(frame.stamp_ns, input_ns, self.latest)
        return 0

    def write(self, turn: Turn, ring: FrameRing) -> None:
        """Write a frame and the messages of its other inputs into the ring; too large, it has failed."""
        frame = turn.frame
        assert frame.data is not None
        inputs = [InputBytes(0, frame.stamp_ns, frame.age_ms, frame.data)]
        inputs += [aged(item, received_ns, frame) for item, received_ns in self.latest.values()]
        try:
            turn.offset, turn.length = ring.write(frame.seq, inputs)
        except ValueError as error:
            turn.fail(Outcome.BAD_INPUT, f"the inputs together are too large: {error}")
        else:
            turn.number, self.started = self.started, self.started + 1
