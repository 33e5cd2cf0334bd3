"""What can stand in for a missing result: the last good output, and the stop made from it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.messages import bytes_before_header
from torchperf_ros.api.outcome import Fallback
from torchperf_ros.safety.stop_output import GoingStop, TimedPath, can_stop
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.frame import USABLE_AGE_MS, Frame, usable_age_ms
from torchperf_ros.stage.turn import Output, Turn, Verdict

_LEAST_STAMPED_BYTES = 12  # of CDR with a header: the encapsulation, and the stamp


@dataclass
class _Made:
    """An output, and the frame that it was computed from."""

    payload: bytes
    frame: Frame

    @functools.cached_property
    def path(self) -> TimedPath | None:
        return TimedPath.read(self.payload)


class FallbackOutputs:
    """Remembers the newest good output, and makes the stop output from it.

    A stop is made once per failure: from the frame that it is published for until one is answered
    otherwise, with a fresh result or a held output, every frame gets the same stop. So the vehicle keeps to
    one braking trajectory. It ends at standstill, where the vehicle stays however long the failure lasts,
    and regardless of late results: a stop that began anew with each of them would never end. A late result
    of a frame from before the stop is not held
    either: it knows nothing of the braking, and would ask for the speed that the vehicle had.

    Only the stage's thread calls, except for `forget`.
    """

    def __init__(self) -> None:
        self.forget(0)

    def forget(self, now_ns: int) -> None:
        """Hold nothing of what was received before now (monotonic).

        The vehicle may be elsewhere when frames return.
        """
        self._not_before_ns = now_ns
        self._good: _Made | None = None
        self._stop: GoingStop | None = None
        self._stop_of: Frame | None = None  # whose output it brakes along
        self._stopping_since_ns: int | None = None  # the stop is what was published last

    def remember(self, payload: bytes, frame: Frame, *, late: bool = False) -> None:
        """A good output of a frame, published or late; an older one than the held one is ignored."""
        since_ns = self._stopping_since_ns
        if late and since_ns is not None and frame.received_ns <= since_ns:
            return
        if not late or since_ns is None:
            self._stop, self._stopping_since_ns = None, None
        is_newer = self._good is None or frame.seq > self._good.frame.seq
        if is_newer and frame.received_ns >= self._not_before_ns:
            self._good = _Made(payload, frame)

    def best(
        self,
        config: StageConfig,
        output_type: str,
        turn: Turn,
        verdict: Verdict,
        *,
        now_ns: int,
        ros_now: Callable[[], int],
    ) -> Output:
        """The frame's own result, else the backup's, else the first fallback that is available.

        `now_ns` is monotonic time, `ros_now` gives ROS time.
        """
        if turn.result is not None:
            return Output(turn.result.payload, turn.frame, turn.result, None, *verdict)
        backup = turn.backup_result
        if backup is None:
            self.prepare(config, output_type, now_ns, ros_now())
        fallback = self.choose(config, now_ns, backup=backup is not None)
        if backup is not None and fallback is Fallback.BACKUP:
            return Output(backup.payload, turn.frame, backup, fallback, *verdict)
        return Output(self.payload(fallback), self.frame, None, fallback, *verdict)

    def source_of(self, output: Output, frame: Frame) -> Frame:
        """The frame for the next stage: with the stamp of the one that a held output comes from."""
        if output.result is not None:
            return frame
        held = self.frame
        return replace(frame, stamp_ns=0 if held is None else held.stamp_ns)

    def prepare(self, config: StageConfig, output_type: str, answer_ns: int, ros_answer_ns: int) -> None:
        """Make the stop output ahead of the deadline, if the answer may come to need it.

        Takes at most some 2 ms.

        There is none where the last good output does not contain the vehicle's place at that time: see
        `TimedPath`. That place follows from its frame's stamp and the monotonic clock; the ROS clock may
        step meanwhile.

        Args:
            config: the stage's configuration.
            output_type: message type of the output.
            answer_ns: monotonic time of the deadline.
            ros_answer_ns: the same in ROS time, from which the stop is stamped; see `times_of`.
        """
        if Fallback.STOP not in config.fallback or not can_stop(output_type):
            return
        if self._choose(config, answer_ns, backup=False, stop=self._good is not None) is Fallback.STOP:
            self._make_stop(config, answer_ns, ros_answer_ns)

    def stop(self, config: StageConfig, answer_ns: int, ros_answer_ns: int) -> bytes | None:
        """The stop output as the answer, also where `stop` is no configured fallback.

        None if there is none: see `prepare`.
        """
        self._make_stop(config, answer_ns, ros_answer_ns)
        self._published(stop=self._stop is not None, answer_ns=answer_ns)
        return self.payload(Fallback.STOP)

    def _make_stop(self, config: StageConfig, answer_ns: int, ros_answer_ns: int) -> None:
        good = self._good
        if self._stop is not None and self._stop_of is not None:
            self._stop = self._stop.at(answer_ns, times_of(self._stop_of, answer_ns, ros_answer_ns)[0])
        elif good is not None and good.path is not None:
            stamped_ns, stepped_ns = times_of(good.frame, answer_ns, ros_answer_ns)
            stop = good.path.moved(stepped_ns).stop(stamped_ns, config.stop_deceleration)
            if stop is not None:
                self._stop, self._stop_of = GoingStop.begun(stop, answer_ns, stamped_ns), good.frame

    def choose(self, config: StageConfig, answer_ns: int, *, backup: bool = False) -> Fallback:
        """Choose the first configured fallback that is available for an answer at `answer_ns`.

        `backup`: whether the backup has a result of this frame.
        """
        chosen = self._choose(config, answer_ns, backup=backup, stop=self._stop is not None)
        self._published(stop=chosen is Fallback.STOP, answer_ns=answer_ns)
        if chosen is not Fallback.STOP:
            self._stop = None
        return chosen

    def _published(self, *, stop: bool, answer_ns: int) -> None:
        if not stop:
            self._stopping_since_ns = None
        elif self._stopping_since_ns is None:
            self._stopping_since_ns = answer_ns

    def _choose(self, config: StageConfig, answer_ns: int, *, backup: bool, stop: bool) -> Fallback:
        good = self._good
        young = good is not None and (answer_ns - good.frame.received_ns) / NS_PER_MS <= config.hold_last_ms
        available = {
            Fallback.BACKUP: backup,
            Fallback.HOLD_LAST: young,
            Fallback.STOP: stop,
            Fallback.NONE: True,
        }
        return next((kind for kind in config.fallback if available[kind]), Fallback.NONE)

    def payload(self, fallback: Fallback | None) -> bytes | None:
        """The bytes to publish for `hold_last` and `stop`; None for the others."""
        made = (
            {Fallback.HOLD_LAST: self._good, Fallback.STOP: self._stop}.get(fallback) if fallback else None
        )
        return None if made is None else made.payload

    def stamp_problem(self, output_type: str) -> str:
        """Why the stamp of the newest good output is wrong, which has to be its frame's.

        "" if it is right or has none.

        For any thread: one looks at it once a second.
        """
        good, before = self._good, bytes_before_header(output_type) if output_type else None
        if good is None or before is None or len(good.payload) < _LEAST_STAMPED_BYTES + before:
            return ""
        stamp_ns, wanted_ns = header_stamp_ns(good.payload, before), good.frame.stamp_ns
        if wanted_ns in {0, stamp_ns}:
            return ""
        what = (
            "has the stamp 0"
            if stamp_ns == 0
            else f"is stamped {(stamp_ns - wanted_ns) / NS_PER_S:+,.3f} s off"
        )
        return f"an output {what}: `postprocess` has to give it its frame's header.stamp"

    @property
    def frame(self) -> Frame | None:
        """The frame that the held output, or the stop, was computed from; None: there is none."""
        if self._stopping_since_ns is not None:
            return self._stop_of
        return None if self._good is None else self._good.frame


def times_of(frame: Frame, now_ns: int, ros_now_ns: int) -> tuple[int, int]:
    """The stamp that a path of a frame gets now, and by how much the ROS clock has stepped since.

    In the time of the path's own stamps, now is the first less the second. That follows from the frame's
    stamp, its age at receipt and the monotonic time since, so a step of the ROS clock moves no vehicle along a
    path. A frame whose stamp was in no ROS time when it was received (before the first `/clock`, or of a
    log that is played without one) has a path in that other time, which does not step, and what replaces it
    is stamped in that time as well.
    """
    since_ns = now_ns - frame.received_ns
    received_ns = frame.stamp_ns + round(usable_age_ms(frame.age_ms) * NS_PER_MS)
    if not frame.stamp_ns:
        received_ns = frame.received_ros_ns
        if not received_ns:
            return ros_now_ns, 0
    elif not ros_now_ns or not abs(frame.age_ms) <= USABLE_AGE_MS:  # NaN compares false
        return received_ns + since_ns, 0
    return ros_now_ns, ros_now_ns - received_ns - since_ns
