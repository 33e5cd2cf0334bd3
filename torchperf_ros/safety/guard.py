"""The guard of a stage's plans: judges each before it is published, and replaces one that fails."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from torchperf_ros.config.safety_options import GuardOptions, guard_options
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import BadInput
from torchperf_ros.frame.outcome import GuardVerdict
from torchperf_ros.frame.stop_output import TimedPath
from torchperf_ros.safety.distance import Closeness, closeness
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import Complex, Finding, Track, beyond_limits, largest, off_start, unreadable
from torchperf_ros.safety.obstacles import Obstacles, Seen, read_obstacles, seen_now
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.safety.source_clock import SourceClock

_JUMP_AT_S = np.linspace(0.0, 1.0, 5)  # where two plans are compared
_JUMP_FORGOTTEN_NS = NS_PER_S  # an older plan is no longer what the vehicle follows
_STOP_POSES, _MOST_STOP_POSES = 31, 200  # of a path that the guard makes
_ROLLS = 1.0  # m/s; slower, the bend that is driven cannot be told from yaw rate and speed
_OWN_MOTION = {"speed", "acceleration", "lateral", "jerk", "curvature", "steering"}
_BY_BRAKING = {"speed", "acceleration", "jerk"}  # what braking on the same path answers, whatever was found


class Checked(NamedTuple):
    """What the guard made of one plan.

    Attributes:
        payload: CDR bytes to publish; None: there is nothing to publish, see `reason`.
        verdict: see `GuardVerdict`.
        check: the first check that failed, out of `GUARD_CHECKS`, or the first in shadow that would; "" if none did.
        value, limit: what that check measured and the limit, in the check's unit; NaN if none failed.
        shadow: what shadow checks would have said, "" if nothing.
        reason: one line for people, "" if all is well.
        ttc_s: time to collision in s, NaN where none is predicted or nothing is known.
        needed_deceleration: m/s^2 that avoid it, NaN likewise.
    """

    payload: bytes | None
    verdict: GuardVerdict
    check: str = ""
    value: float = math.nan
    limit: float = math.nan
    shadow: str = ""
    reason: str = ""
    ttc_s: float = math.nan
    needed_deceleration: float = math.nan


class _Situation(NamedTuple):
    """What is known at the time of a check, and why something is not."""

    now_ns: int
    ros_now_ns: int
    motion: Motion | None
    motion_age_s: float
    seen: Seen
    no_motion: str
    no_obstacles: str


class Known(NamedTuple):
    """What a guard knows at one time, by which other plans can be judged, elsewhere, too."""

    options: GuardOptions
    situation: _Situation

    def packed(self) -> list[Any]:
        """The same in what JSON knows; `unpacked` makes it whole."""
        own = asdict(self.options)
        options = {f"vehicle.{name}": value for name, value in own.pop("vehicle").items()}
        options |= {f"guard.{name}": _listed(value) for name, value in own.items()}
        now_ns, ros_now_ns, motion, age_s, seen, *open_to = self.situation
        moved = None if motion is None else list(map(_text, astuple(motion)))
        return [options, now_ns, ros_now_ns, moved, age_s, seen.packed(), *open_to]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> "Known":
        """Of what `packed` gave."""
        options, now_ns, ros_now_ns, moved, age_s, seen, *open_to = packed
        motion = moved and Motion(moved[0].encode("latin-1"), moved[1].encode("latin-1"), *moved[2:])
        situation = _Situation(now_ns, ros_now_ns, motion, age_s, Seen.unpacked(seen), *open_to)
        return cls(guard_options(options), situation)


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value


def _text(value: object) -> object:
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Judgement(NamedTuple):
    """What was found about one path; `lane` is the way it leads, None where that was not asked for."""

    findings: list[Finding]
    unchecked: dict[str, str]
    closeness: Closeness = Closeness()
    lane: Lane | None = None

    def failed(self, checks: frozenset[str], *, unless_contact: bool = False) -> Finding | None:
        """The first of these checks that failed; `unless_contact`: coming too close without touching does not count."""
        if unless_contact and not self.closeness.contact:
            checks -= {"distance"}
        return next((one for one in self.findings if one.check in checks), None)


class _Rung(NamedTuple):
    """A way to replace a plan: what it is called, the path, by which checks it is judged, what it does in words."""

    verdict: GuardVerdict
    path: TimedPath
    checks: frozenset[str]
    does: str


@dataclass
class _Refusals:
    """What could not be used of one input, whose thread counts."""

    messages: int = 0
    markers: int = 0
    no_velocity: int = 0
    why: str = ""
    clock: str = ""  # how it differs from ROS time, "" where it does not

    def note(self, why: str, markers: int = 0) -> None:
        self.messages, self.markers, self.why = self.messages + 1, self.markers + markers, why

    @property
    def in_words(self) -> str:
        return f" (refused: {self.why})" if self.why else ""


class Guard:
    """Checks one stage's plans (`nav_msgs/Path`) against odometry, limits and obstacles.

    `moved` and `saw` may be called on any thread, `check` on the stage's: what one hands to another is replaced whole.

    Attributes:
        news: what was learned of a source's clock, for people.
    """

    def __init__(self, options: GuardOptions) -> None:
        """Know nothing yet."""
        self._options = options
        # What cannot be read cannot be judged by the other checks, so it acts as soon as one of them does.
        self._acts = options.act and options.act | {"finite", "stamps"}
        self._odometry, self._heard = _Refusals(), [_Refusals() for _ in options.obstacles]
        self.news: deque[str] = deque(maxlen=1 + len(options.obstacles))
        self.forget(0)

    @property
    def acts(self) -> bool:
        """Whether a check replaces plans; else all of them are in shadow."""
        return bool(self._options.act)

    @property
    def refused(self) -> dict[str, str | int]:
        """What could not be used: per input (`odometry`, `obstacles 0`) how many messages not or not wholly.

        Under the same name with ` markers` how many of their markers, with ` why` the last reason, with ` clock` how
        its clock differs from ROS time; `no_velocity`: how many obstacles counted as standing without being known to.
        """
        named = {"odometry": self._odometry} | {f"obstacles {at}": one for at, one in enumerate(self._heard)}
        found: dict[str, str | int] = {}
        for name, one in named.items():
            values: dict[str, str | int] = {
                "": one.messages,
                " why": one.why,
                " markers": one.markers,
                " clock": one.clock,
            }
            found |= {name + what: value for what, value in values.items() if value}
        unknown = sum(one.no_velocity for one in self._heard)
        return found | ({"no_velocity": unknown} if unknown else {})

    def forget(self, now_ns: int) -> None:
        """Forget what was received and published before now (monotonic): the vehicle may be elsewhere."""
        self._not_before_ns = now_ns
        self._motion: Motion | None = None
        self._motion_clock = SourceClock()
        self._sources: list[Obstacles | None] = [None] * len(self._options.obstacles)  # each has one thread
        self._valid: TimedPath | None = None  # the last plan of the stage that was accepted
        self._stop: TimedPath | None = None  # what was published last, if that was a stop
        # Of the last published plan: its frame, whether it was left there without odometry, when, and its way.
        self._published: tuple[bytes, bool, int, Lane] | None = None

    def moved(self, odometry: bytes, received_ns: int) -> None:
        """Take the CDR bytes of a `nav_msgs/Odometry`, received at this monotonic time."""
        try:
            motion = Motion.read(odometry, received_ns)
        except BadInput as error:
            self._odometry.note(str(error))
            return
        if received_ns >= self._not_before_ns:
            self._motion = motion

    def saw(self, source: int, markers: bytes, received_ns: int, stamp_ns: int = 0) -> None:
        """Take the CDR bytes of a `visualization_msgs/MarkerArray` of the source with this index in `obstacles`.

        `stamp_ns`: of what it was computed from; it counts where the markers have none. After an array that cannot be
        read, the one before still counts, but does not prove that the way is free.
        """
        sources, heard = self._sources, self._heard[source]
        before, clock = sources[source], self._motion_clock
        try:
            seen = read_obstacles(markers, received_ns, self._options, self._motion, before, stamp_ns, clock)
        except BadInput as error:
            heard.note(str(error))
            if before is not None:
                sources[source] = replace(before, unclear="cannot be read since then")
            return
        heard.no_velocity += seen.no_velocity
        if seen.refused or seen.unclear:
            heard.note(seen.why or seen.unclear, seen.refused)
        if received_ns >= self._not_before_ns:
            sources[source] = seen

    def check(self, plan: bytes | None, now_ns: int, ros_now_ns: int, age_ms: float) -> Checked:
        """Judge a plan, and say what to publish.

        Args:
            plan: CDR bytes of a `nav_msgs/Path`; None: the stage has none.
            now_ns: monotonic time.
            ros_now_ns: ROS time.
            age_ms: age of the frame that the plan was computed from: the measured part of the response time.
        """
        act = self._options.act
        situation = self._situation(now_ns, ros_now_ns, age_ms)
        path, judged = self._read(plan, situation)
        failed = judged.failed(self._acts)
        unchecked = "; ".join(dict.fromkeys(why for check, why in judged.unchecked.items() if check in act))
        if plan is None:
            why = "there is no plan"
        elif failed is not None:
            why = f"{failed.check}: the plan {failed.text}"
        else:
            if path is not None:
                self._valid, self._stop = path, None
                self._note(path, judged, situation)
            verdict = GuardVerdict.UNCHECKED if unchecked else GuardVerdict.ACCEPT
            return self._checked(plan, verdict, judged, None, unchecked)
        if not act:
            return self._checked(plan, GuardVerdict.ACCEPT, judged, None, why)
        payload, verdict, does = self._replacement(path, situation, goes_on=plan is not None)
        return self._checked(payload, verdict, judged, failed, "; ".join(filter(None, (why, unchecked, does))))

    def known(self, now_ns: int, ros_now_ns: int, age_ms: float) -> Known:
        """What is known now, for another plan to be judged by."""
        return Known(self._options, self._situation(now_ns, ros_now_ns, age_ms))

    @classmethod
    def refusal(cls, plan: bytes, known: Known) -> str:
        """Why a plan would be replaced, "" where it would not, by the checks that act; `jump` asks for the last one."""
        guard = cls(replace(known.options, act=known.options.act - {"jump"}, shadow=frozenset()))
        _, judged = guard._read(plan, known.situation)
        failed = judged.failed(guard._acts)
        return "" if failed is None else f"{failed.check}: the plan {failed.text}"

    def _checked(
        self, payload: bytes | None, verdict: GuardVerdict, of: _Judgement, failed: Finding | None, reason: str
    ) -> Checked:
        mute = self._options.shadow
        found = failed or next((one for one in of.findings if one.check in mute), None)
        check, value, limit = ("", math.nan, math.nan) if found is None else found[:3]
        shadow = [f"{one.check}: the plan {one.text}" for one in of.findings if one.check in mute and one is not failed]
        shadow += [f"{check} is not checked: {why}" for check, why in of.unchecked.items() if check in mute]
        *_, ttc_s, needed = of.closeness
        return Checked(payload, verdict, check, value, limit, "; ".join(shadow), reason, ttc_s, needed)

    def _situation(self, now_ns: int, ros_now_ns: int, age_ms: float) -> _Situation:
        options, motion, sources = self._options, self._motion, tuple(self._sources)
        age, no_motion = math.nan, "no odometry was received" + self._odometry.in_words
        if motion is not None:
            age, no_motion = self._motion_clock.age_s(motion.stamp_ns, motion.received_ns, now_ns, ros_now_ns)
            if no_motion or 1000 * age > options.odometry_timeout_ms:
                what = no_motion or f"{1000 * age:.0f} ms old"
                no_motion = f"odometry is {what}{self._odometry.in_words}"
        seen, missing = seen_now(sources, options, now_ns, ros_now_ns, age_ms / 1000)
        no_obstacles = "; ".join(
            f"obstacles on {options.obstacles[source]} {why}{self._heard[source].in_words}"
            for source, why in missing.items()
        )
        self._learn("odometry", self._odometry, self._motion_clock)
        for at, source in enumerate(sources):
            if source is not None:
                self._learn(f"obstacles on {options.obstacles[at]}", self._heard[at], source.clock)
        return _Situation(now_ns, ros_now_ns, None if no_motion else motion, age, seen, no_motion, no_obstacles)

    def _learn(self, name: str, heard: "_Refusals", clock: SourceClock) -> None:
        """Say once that a source's stamps are not ROS time."""
        if clock.is_ros is False and not heard.clock:
            heard.clock = f"its own, {abs(clock.off_s):.6g} s {'ahead of' if clock.off_s > 0 else 'behind'} ROS time"
            self.news.append(
                f"{name}: the clock of its stamps is {heard.clock}; its receipt counts, and their progress"
            )

    def _read(self, plan: bytes | None, situation: _Situation) -> tuple[TimedPath | None, _Judgement]:
        """The path, None where it cannot be followed at all, and what is wrong with it."""
        options = self._options
        if plan is None:
            return None, _Judgement([], {})
        try:
            path = TimedPath.parse(plan)
        except BadInput as error:
            return None, _Judgement([Finding("finite", math.nan, math.nan, str(error))], {})
        if (finding := unreadable(path, situation.ros_now_ns, situation.motion)) is not None:
            return None, _Judgement([finding], {})
        return path, self._judge(path, situation, options.act | options.shadow)

    def _judge(self, path: TimedPath, situation: _Situation, checks: frozenset[str]) -> _Judgement:
        """Make these checks of a path that can be read."""
        options, motion = self._options, situation.motion
        unknown = situation.no_motion
        if motion is not None and path.frame not in {motion.frame, motion.child_frame}:
            own, theirs = (name.decode("utf-8", "replace") for name in (path.frame, motion.frame))
            unknown = f"the plan's frame_id {own!r} is not the odometry's, {theirs!r}, and tf is not looked up"
            motion = None
        unchecked: dict[str, str] = {check: unknown for check in ("start", "distance") if check in checks and unknown}
        track = Track.of(path, situation.ros_now_ns, motion, situation.motion_age_s)
        findings: list[Finding] = []
        if "start" in checks and motion is not None:
            findings += filter(None, [off_start(track, motion, situation.motion_age_s, options)])
        if checks & _OWN_MOTION:
            findings += [one for one in beyond_limits(track, options) if one.check in checks]
        if not checks & {"jump", "distance"}:
            return _Judgement(findings, unchecked)
        ahead, widened_m = track.from_now().thinned(options.vehicle.length_m + options.vehicle.width_m)
        lane, close = Lane(ahead), Closeness()
        if "jump" in checks:
            findings += filter(None, [self._jump(track, path, motion, situation)])
        if "distance" in checks and motion is not None:
            if situation.no_obstacles:
                unchecked["distance"] = situation.no_obstacles
            bend = motion.yaw_rate / motion.speed if abs(motion.speed) > _ROLLS else 0.0
            close = closeness(ahead, widened_m, lane, bend, situation.seen, options)
            findings += filter(None, [close.finding])
        return _Judgement(findings, unchecked, close, lane)

    def _jump(self, track: Track, path: TimedPath, motion: Motion | None, situation: _Situation) -> Finding | None:
        """How far aside of the last published plan this one leads within its next second."""
        last = self._published
        if last is None or last[:2] != (path.frame, motion is None):
            return None
        if situation.now_ns - last[2] > _JUMP_FORGOTTEN_NS:
            return None
        places: Complex = np.interp(_JUMP_AT_S, track.t_s, track.place)
        aside_m = largest(np.abs(last[3].beside(places)[1]))
        limit = self._options.max_jump_m
        if aside_m <= limit:
            return None
        return Finding("jump", aside_m, limit, f"leads {aside_m:.3g} m aside of the last one; {limit:g} m are allowed")

    def _note(self, path: TimedPath, judged: _Judgement, situation: _Situation) -> None:
        """Remember which way the published plan leads."""
        motion = situation.motion
        raw = motion is None or path.frame not in {motion.frame, motion.child_frame}
        self._published = None if judged.lane is None else (path.frame, raw, situation.now_ns, judged.lane)

    def _replacement(
        self, path: TimedPath | None, situation: _Situation, *, goes_on: bool
    ) -> tuple[bytes | None, GuardVerdict, str]:
        """The first rung of the ladder that holds: its bytes, its verdict and what it does in words."""
        stops: list[tuple[bool, _Rung]] = []  # with whether one can be driven, but for what is in its way
        for rung in self._ladder(path, situation, goes_on=goes_on):
            judged = self._judge(rung.path, situation, rung.checks)
            stop = rung.verdict is GuardVerdict.STOP
            if judged.failed(rung.checks, unless_contact=stop) is None:
                self._stop, self._published = (rung.path if stop else None), None
                if not stop:
                    self._note(rung.path, judged, situation)
                return rung.path.bytes(), rung.verdict, rung.does
            if stop:
                stops.append((judged.failed(rung.checks - {"distance"}) is None, rung))
        if not stops:
            return None, GuardVerdict.UNCHECKED, "there is nothing to stop along, neither odometry nor an earlier plan"
        last = max(stops, key=lambda found: found[0])[1]
        self._stop, self._published = last.path, None
        return last.path.bytes(), GuardVerdict.UNAVOIDABLE, f"a collision is not avoided by any of it; {last.does}"

    def _ladder(self, path: TimedPath | None, situation: _Situation, *, goes_on: bool) -> Iterator[_Rung]:
        """What may replace a plan, best first; `goes_on`: the stage still plans, so an earlier plan may go on."""
        options, now_ns, motion = self._options, situation.ros_now_ns, situation.motion
        on_path = options.act - _BY_BRAKING
        if path is not None:
            for deceleration in (options.rss_brake, options.max_deceleration):
                if (braked := self._braked(path, situation, deceleration)) is not None:
                    does = f"brakes by {deceleration:g} m/s^2 on the same path"
                    yield _Rung(GuardVerdict.BRAKE, braked, on_path, does)
        valid = self._valid
        if valid is not None and motion is not None and valid.frame not in {motion.frame, motion.child_frame}:
            valid = None  # it went out unchecked, and cannot be checked now
        still_ns = now_ns + options.start_tolerance_s * NS_PER_S
        if goes_on and valid is not None and valid.stamps_ns[0] <= now_ns and valid.stamps_ns[-1] >= still_ns:
            yield _Rung(GuardVerdict.REBASED, valid.cut(now_ns), options.act - {"jump"}, "the last valid plan goes on")
        hardest = f"stops by {options.max_deceleration:g} m/s^2"
        if motion is None and self._stop is not None:  # begun anew from a plan's speed, it would never end
            yield _Rung(GuardVerdict.STOP, self._stop, on_path, "the stop goes on")
        if path is not None and (braked := self._braked(path, situation, options.max_deceleration)) is not None:
            yield _Rung(GuardVerdict.STOP, braked, on_path, f"{hardest} on the same path")
        if valid is not None and (braked := self._braked(valid, situation, options.max_deceleration)) is not None:
            yield _Rung(GuardVerdict.STOP, braked, on_path - {"jump"}, f"{hardest} along the last valid plan")
        if motion is not None:
            arc = self._arc(motion, situation)
            yield _Rung(GuardVerdict.STOP, arc, options.act & {"distance"}, f"{hardest} in the bend that it drives")

    def _braked(self, path: TimedPath, situation: _Situation, deceleration: float) -> TimedPath | None:
        """From now on along a path, from the vehicle's own speed where that is known."""
        start_ns = max(situation.ros_now_ns, int(path.stamps_ns[0]))
        if start_ns >= path.stamps_ns[-1]:
            return None
        count = min(max(len(path.stamps_ns), _STOP_POSES), _MOST_STOP_POSES)
        speed = None if situation.motion is None else abs(situation.motion.speed)
        return path.braked(start_ns, deceleration, count, speed=speed)

    def _arc(self, motion: Motion, situation: _Situation) -> TimedPath:
        """Full braking from where the vehicle is now, as it turns now."""
        options = self._options
        x, y, yaw = motion.after(situation.motion_age_s)
        most = options.vehicle.max_curvature * abs(motion.speed)
        here = replace(motion, x=x, y=y, yaw=yaw, yaw_rate=min(max(motion.yaw_rate, -most), most))
        times_s = np.linspace(0.0, abs(motion.speed) / options.max_deceleration + 1.0, _STOP_POSES)
        x, y, yaw = here.after(times_s)
        points = np.stack((x, y, np.full_like(x, motion.z)), axis=1)
        stamps_ns = situation.ros_now_ns + np.rint(times_s * NS_PER_S).astype(np.int64)
        path = TimedPath.made(stamps_ns, points, yaw, motion.frame)
        return path.braked(situation.ros_now_ns, options.max_deceleration, _STOP_POSES)
