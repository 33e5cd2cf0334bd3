"""The guard of a stage's plans: judges each before it is published, and replaces one that fails."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety.distance import Closeness, closeness
from torchperf_ros.safety.lane import Lane
from torchperf_ros.safety.limits import (
    Complex,
    Finding,
    Track,
    beyond_limits,
    largest,
    off_start,
    unit,
    unreadable,
)
from torchperf_ros.safety.markers import MOST_OBJECTS
from torchperf_ros.safety.obstacles import Obstacles, Seen, read_obstacles, seen_now
from torchperf_ros.safety.odometry import Motion, YawRates
from torchperf_ros.safety.own_lane import IN_LANE_M, OwnLane
from torchperf_ros.safety.source_clock import SourceClock, was_overtaken
from torchperf_ros.safety.stop_output import GoingStop, TimedPath
from torchperf_ros.settings.safety_options import GuardOptions, guard_options

_JUMP_AT_S = np.linspace(0.0, 1.0, 5)  # where two plans are compared
_JUMP_FORGOTTEN_NS = NS_PER_S  # an older plan is no longer what the vehicle follows
_STOP_POSES, _MOST_STOP_POSES = 31, 200  # of a path that the guard makes
_STANDS = 0.1  # m/s; slower, a vehicle has no direction of travel
_MOVES_M = 0.001  # from one pose to the next; less is rounding
# Until the vehicle meets what comes: later, no way back is asked for; sooner, one has to be known.
_FAR_S, _NEAR_S = 15.0, 8.0
_AS_FAST = 0.5  # m/s between the vehicle and the plan that it goes on with
_AS_HARD = 1.0  # m/s; impacts that differ by less are the same
_TIME_HELPS = 3.0  # m/s^2: so much of an impact is still to be avoided for each second until then
# After which without an accepted plan the planner has given up: single plans may fail.
_GIVES_UP_NS = NS_PER_S // 2
_PROBES_S = np.linspace(0.0, 3.0, 7)  # for which a vehicle that stands looks at what comes
_ROLLS = 1.0  # m/s; slower, the bend that is driven does not show in yaw rate and speed
_NOISY = 0.001  # rad/s; 3 mrad after a plan's 3 s
_BEGINS = 0.125  # of a plan's way; the part that `prediction.dips` compares with the bend that is driven
_SHOWN_M = 1.0  # of a plan, from which on its bend counts for such a vehicle
_EVEN = 0.1  # of all that a plan turns: its thirds differ by less in a bend of the road
_TURNS_OFF = 0.04  # 1/m: a plan that is sharper turns off, and says nothing of the road behind
_OWN_MOTION = {"speed", "acceleration", "lateral", "jerk", "curvature", "steering"}
_BY_BRAKING = {"speed", "acceleration", "jerk"}  # what braking on the same path answers, with any finding


class Checked(NamedTuple):
    """What the guard made of one plan.

    Attributes:
        payload: CDR bytes to publish; None: there is nothing to publish, see `reason`.
        verdict: see `GuardVerdict`.
        check: the first check that failed, out of `GUARD_CHECKS`, or the first in shadow that would; "" if
        none did. value, limit: what that check measured and the limit, in the check's unit; NaN if none
        failed.
        shadow: what shadow checks would have found, "" if nothing.
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
    """What a guard knows at one time, by which other plans can be judged, elsewhere, too.

    `stepped_ns`: see `check`.
    """

    options: GuardOptions
    situation: _Situation
    stepped_ns: int = 0

    def packed(self) -> list[Any]:
        """The same in what JSON knows; `unpacked` makes it whole."""
        own = asdict(self.options)
        options = {f"vehicle.{name}": value for name, value in own.pop("vehicle").items()}
        options |= {f"guard.{name}": _listed(value) for name, value in own.items()}
        now_ns, ros_now_ns, motion, age_s, seen, *open_to = self.situation
        moved = None if motion is None else list(map(_text, astuple(motion)))
        return [options, self.stepped_ns, now_ns, ros_now_ns, moved, age_s, seen.packed(), *open_to]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> "Known":
        """Of what `packed` gave."""
        options, stepped_ns, now_ns, ros_now_ns, moved, age_s, seen, *open_to = packed
        motion = moved and Motion(moved[0].encode("latin-1"), moved[1].encode("latin-1"), *moved[2:])
        situation = _Situation(now_ns, ros_now_ns, motion, age_s, Seen.unpacked(seen), *open_to)
        return cls(guard_options(options), situation, stepped_ns)


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
    bend: float | None = None  # in 1/m that the vehicle drives; None: the path is not where the odometry is

    def failed(self, checks: frozenset[str], *, unless_contact: bool = False) -> Finding | None:
        """The first of these checks that failed.

        `unless_contact`: coming too close without touching does not count.
        """
        if unless_contact and not self.closeness.contact:
            checks -= {"distance"}
        return next((one for one in self.findings if one.check in checks), None)


class _Rung(NamedTuple):
    """A way to replace a plan.

    What it is called, the path, by which checks it is judged, what it does in words.
    """

    verdict: GuardVerdict
    path: TimedPath
    checks: frozenset[str]
    does: str
    returns: bool = False  # whether it leads back into the lane
    begun: bool = False  # whether it was clear when it began, so that it may come close now
    last: bool = False  # whether it may end in the way of what comes, which is not near yet

    def worth(self, judged: _Judgement) -> tuple[bool, float]:
        """The less the better, of those that touch something.

        Whether it cannot be driven, and how hard it touches.

        That is by how many m/s both are against each other, less what a contact that comes later leaves
        time for.
        """
        close = judged.closeness
        drivable = judged.failed(self.checks - {"distance"}) is None
        return not drivable, close.impact - _TIME_HELPS * close.contact_s


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

    `moved` and `saw` may be called on any thread, `check` on the stage's: what one hands to another is
    replaced whole.

    Attributes:
        news: what was learned of a source's clock, for people.
    """

    def __init__(self, options: GuardOptions) -> None:
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
        """What could not be used.

        Per input (`odometry`, `obstacles 0`) how many messages not or not wholly.

        Under the same name with ` markers` how many of their markers, with ` why` the last reason, with `
        clock` how its clock differs from ROS time; `no_velocity`: how many obstacles counted as standing
        without being known to.
        """
        named = {"odometry": self._odometry} | {
            f"obstacles {at}": one for at, one in enumerate(self._heard)
        }
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
        self._yaw_rates = YawRates()
        self._knows_noise = False  # of the yaw rate
        self._sources: list[Obstacles | None] = [None] * len(self._options.obstacles)  # each has one thread
        # The last plan that was accepted, and by how much the ROS clock was ahead of the monotonic one
        # then.
        self._valid: tuple[TimedPath, int] | None = None
        self._accepted_ns = now_ns  # when that was
        self._going: GoingStop | None = None  # what was published last, if that brakes to standstill
        # How the vehicle leaves the way of what comes, and by how much the ROS clock was ahead as above.
        self._way_out: tuple[TimedPath, int] | None = None
        self._braked_from: Motion | None = None  # the odometry that it was made of
        self._own_lane = OwnLane()
        # Of the last published plan: its frame, whether it was left there without odometry, when, and its
        # way.
        self._published: tuple[bytes, bool, int, Lane] | None = None

    def moved(self, odometry: bytes, received_ns: int) -> None:
        """Take the CDR bytes of a `nav_msgs/Odometry`, received at this monotonic time."""
        try:
            motion = Motion.read(odometry, received_ns)
        except BadInput as error:
            self._odometry.note(str(error))
            return
        before, most_ms = self._motion or motion, self._options.odometry_timeout_ms
        if was_overtaken(motion.stamp_ns, received_ns - before.received_ns, before.stamp_ns, most_ms):
            self._odometry.note("stamped before the message that came before it")
        elif received_ns >= self._not_before_ns:
            self._motion = self._yaw_rates.take(motion)

    def saw(self, source: int, markers: bytes, received_ns: int, stamp_ns: int = 0) -> None:
        """Take the CDR bytes of a `visualization_msgs/MarkerArray` of the source with this index in `obstacles`.

        `stamp_ns`: of what it was computed from; it counts where the markers have none. After an array that
        cannot be read, the one before still counts, but does not prove that the way is free. One that was
        overtaken on its way does not replace the newer one: both count.
        """
        sources, heard = self._sources, self._heard[source]
        before, clock = sources[source], self._motion_clock
        try:
            seen = read_obstacles(
                markers, received_ns, self._options, self._motion, before, stamp_ns, clock
            )
        except BadInput as error:
            heard.note(str(error))
            if before is not None:
                sources[source] = replace(before, unclear="cannot be read since then")
            return
        heard.no_velocity += seen.no_velocity
        if seen.refused or seen.unclear:
            heard.note(seen.why or seen.unclear, seen.refused)
        if before is not None and len(before.stamps_ns) <= MOST_OBJECTS:
            seen = before.before(seen, self._options.obstacles_timeout_ms)
        if received_ns >= self._not_before_ns:
            sources[source] = seen

    def check(
        self,
        plan: bytes | None,
        now_ns: int,
        ros_now_ns: int,
        age_ms: float,
        stepped_ns: int = 0,
        *,
        is_stop: bool = False,
    ) -> Checked:
        """Judge a plan, and say what to publish.

        Args:
            plan: CDR bytes of a `nav_msgs/Path`; None: the stage has none.
            now_ns: monotonic time.
            ros_now_ns: ROS time, from which a replacement is stamped.
            age_ms: age of the frame that the plan was computed from: the measured part of the response
                time.
            stepped_ns: by how much the ROS clock has stepped since that frame, so that the plan's stamps
                are behind it.
            is_stop: whether it is the stage's stop: there is no plan any more, as where `plan` is None.
        """
        act = self._options.act
        situation = self._situation(now_ns, ros_now_ns, age_ms)
        path, judged = self._read(plan, situation, stepped_ns)
        way_out, blocked = self._way_out_of(path, judged, situation)
        judged.findings.extend(filter(None, [blocked]))
        failed = judged.failed(self._acts)
        unchecked = "; ".join(dict.fromkeys(why for check, why in judged.unchecked.items() if check in act))
        has_ended = plan is None or is_stop
        has_given_up = has_ended or now_ns - self._accepted_ns > _GIVES_UP_NS
        home = self._ways_home(path, situation, has_ended=has_ended) if has_given_up and act else []
        if plan is None:
            why = "there is no plan"
        elif failed is not None:
            why = f"{failed.check}: the plan {failed.text}"
        elif is_stop and (back := self._replacement(home, situation, leaves=False))[0] is not None:
            self._keep_lane(judged, situation, goes_out=False)
            does = f"the stop would end beside the lane; {back[2]}"
            return self._checked(back[0], back[1], judged, None, does)
        else:
            if path is not None:
                self._valid, self._going = (path, ros_now_ns - now_ns), None
                self._accepted_ns = now_ns
                self._way_out = None if way_out is None else (way_out, ros_now_ns - now_ns)
                self._note(path, judged, situation)
                self._keep_lane(judged, situation, goes_out=True)
            verdict = GuardVerdict.UNCHECKED if unchecked else GuardVerdict.ACCEPT
            return self._checked(plan, verdict, judged, None, unchecked)
        if not act:
            return self._checked(plan, GuardVerdict.ACCEPT, judged, None, why)
        self._keep_lane(judged, situation, goes_out=False)
        close, lane, bend = judged.closeness, judged.lane, judged.bend
        leaves = path is None and self._way_out is not None
        if lane is not None and bend is not None and (close.finding is not None or close.in_way):
            leaves |= self._own_lane.leads_aside(lane, bend)
        ladder = self._ladder(path, situation, home, goes_on=plan is not None, leaves=leaves)
        payload, verdict, does = self._replacement(ladder, situation, leaves=leaves)
        if verdict is GuardVerdict.BRAKE and not leaves:
            self._keep_lane(judged, situation, goes_out=True)
        return self._checked(
            payload, verdict, judged, failed, "; ".join(filter(None, (why, unchecked, does)))
        )

    def known(self, now_ns: int, ros_now_ns: int, age_ms: float, stepped_ns: int = 0) -> Known:
        return Known(self._options, self._situation(now_ns, ros_now_ns, age_ms), stepped_ns)

    @classmethod
    def refusal(cls, plan: bytes, known: Known) -> str:
        """Why a plan would be replaced, "" where it would not, by the checks that act.

        `jump` asks for the last one.
        """
        guard = cls(replace(known.options, act=known.options.act - {"jump"}, shadow=frozenset()))
        _, judged = guard._read(plan, known.situation, known.stepped_ns)
        failed = judged.failed(guard._acts)
        return "" if failed is None else f"{failed.check}: the plan {failed.text}"

    def _checked(
        self,
        payload: bytes | None,
        verdict: GuardVerdict,
        of: _Judgement,
        failed: Finding | None,
        reason: str,
    ) -> Checked:
        mute = self._options.shadow
        found = failed or next((one for one in of.findings if one.check in mute), None)
        check, value, limit = ("", math.nan, math.nan) if found is None else found[:3]
        shadow = [
            f"{one.check}: the plan {one.text}"
            for one in of.findings
            if one.check in mute and one is not failed
        ]
        shadow += [f"{check} is not checked: {why}" for check, why in of.unchecked.items() if check in mute]
        return Checked(payload, verdict, check, value, limit, "; ".join(shadow), reason, *of.closeness[2:4])

    def _situation(self, now_ns: int, ros_now_ns: int, age_ms: float) -> _Situation:
        options, motion, sources = self._options, self._motion, tuple(self._sources)
        age, no_motion = math.nan, "no odometry was received" + self._odometry.in_words
        if motion is not None:
            age, no_motion = self._motion_clock.age_s(
                motion.stamp_ns, motion.received_ns, now_ns, ros_now_ns
            )
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
        return _Situation(
            now_ns, ros_now_ns, None if no_motion else motion, age, seen, no_motion, no_obstacles
        )

    def _learn(self, name: str, heard: "_Refusals", clock: SourceClock) -> None:
        """Say once that a source's stamps are not ROS time."""
        if clock.is_ros is False and not heard.clock:
            heard.clock = (
                f"its own, {abs(clock.off_s):.6g} s {'ahead of' if clock.off_s > 0 else 'behind'} ROS time"
            )
            self.news.append(
                f"{name}: the clock of its stamps is {heard.clock}; its receipt counts, and their progress"
            )

    def _read(
        self, plan: bytes | None, situation: _Situation, stepped_ns: int
    ) -> tuple[TimedPath | None, _Judgement]:
        """The path in the ROS time of now, None where it cannot be followed at all, and what is wrong with it."""
        if plan is None:
            return None, _Judgement([], {})
        try:
            path = TimedPath.parse(plan).moved(stepped_ns)
        except BadInput as error:
            return None, _Judgement([Finding("finite", math.nan, math.nan, str(error))], {})
        if (finding := unreadable(path, situation.ros_now_ns, situation.motion)) is not None:
            return None, _Judgement([finding], {})
        return path, self._judge(path, situation, self._options.act | self._options.shadow)

    def _judge(self, path: TimedPath, situation: _Situation, checks: frozenset[str]) -> _Judgement:
        options, motion = self._options, situation.motion
        unknown = situation.no_motion
        if motion is not None and path.frame not in {motion.frame, motion.child_frame}:
            own, theirs = (name.decode("utf-8", "replace") for name in (path.frame, motion.frame))
            unknown = (
                f"the plan's frame_id {own!r} is not the odometry's, {theirs!r}, and tf is not looked up"
            )
            motion = None
        unchecked: dict[str, str] = {
            check: unknown for check in ("start", "distance") if check in checks and unknown
        }
        track = Track.of(path, situation.ros_now_ns, motion, situation.motion_age_s)
        findings: list[Finding] = []
        if "start" in checks and motion is not None:
            findings += filter(None, [off_start(track, motion, situation.motion_age_s, options)])
        if checks & _OWN_MOTION:
            findings += [one for one in beyond_limits(track, options) if one.check in checks]
        if not checks & {"jump", "distance"}:
            return _Judgement(findings, unchecked)
        ahead, widened_m = track.from_now().thinned(options.vehicle.length_m + options.vehicle.width_m)
        bend = None
        if motion is not None:
            bend = _bend_driven(motion, ahead) if abs(motion.speed) > _ROLLS else _bend_of(ahead)
        lane, close = Lane(ahead, bend), Closeness()
        if "jump" in checks:
            findings += filter(None, [self._jump(track, path, motion, situation)])
        if "distance" in checks and bend is not None:
            if situation.no_obstacles:
                unchecked["distance"] = situation.no_obstacles
            close = closeness(
                ahead, widened_m, lane, bend, situation.seen, options, known=self._own_lane.shows(lane)
            )
            findings += filter(None, [close.finding])
        return _Judgement(findings, unchecked, close, lane, bend)

    def _jump(
        self, track: Track, path: TimedPath, motion: Motion | None, situation: _Situation
    ) -> Finding | None:
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
        return Finding(
            "jump", aside_m, limit, f"leads {aside_m:.3g} m aside of the last one; {limit:g} m are allowed"
        )

    def _note(self, path: TimedPath, judged: _Judgement, situation: _Situation) -> None:
        """Remember which way the published plan leads."""
        self._published = (
            None
            if judged.lane is None
            else (path.frame, judged.bend is None, situation.now_ns, judged.lane)
        )

    def _keep_lane(self, judged: _Judgement, situation: _Situation, *, goes_out: bool) -> None:
        """Note the way of a path, if it is where the odometry is."""
        motion = situation.motion
        if motion is not None and motion.turns is not None and not self._knows_noise:
            self._knows_noise = True
            # By so much noise, the first plans may have looked like what they were not.
            if motion.unsure > _NOISY:
                self._own_lane = OwnLane()
        if judged.lane is not None and judged.bend is not None:
            self._own_lane.take(
                judged.lane, judged.bend, situation.now_ns, situation.seen, goes_out=goes_out
            )

    def _way_out_of(
        self, path: TimedPath | None, judged: _Judgement, situation: _Situation
    ) -> tuple[TimedPath | None, Finding | None]:
        """How the vehicle would leave the way of what comes, in which this plan ends; or why it could not.

        The plan is followed until the next one is judged, so from there a way has to lead back into the lane. What
        comes need not brake for it. A planner that begins anew with each plan may never do what each plan says.
        """
        motion, lane, options = situation.motion, judged.lane, self._options
        if path is None or motion is None or lane is None or lane.backward or not judged.closeness.in_way:
            return None, None
        self._own_lane.is_theirs(lane)
        if judged.closeness.finding is not None or judged.closeness.meets_s > _FAR_S:
            return None, None
        track = Track.of(path, situation.ros_now_ns, motion, situation.motion_age_s).from_now()
        finding, tried = None, False
        for out in self._own_lane.ways_out(
            track, motion, situation.ros_now_ns, options.rss_brake, options.max_deceleration
        ):
            found, tried = self._judge(out, situation, frozenset({"distance"})), True
            if not found.findings and (self._ends_in_lane(found) or not found.closeness.in_way):
                return out, None
            finding = next((one for one in found.findings if one.check == "distance"), finding)
        if not tried and (
            judged.closeness.meets_s > _NEAR_S
            or self._own_lane.aside_m(complex(lane.own_place[0])) <= IN_LANE_M
        ):
            return None, None  # it is still in its lane, or none is known, and it is not urgent
        text = "ends in the way of what comes towards it, and no way back into its lane is clear"
        if finding is None:
            return None, Finding("distance", math.nan, math.nan, text)
        return None, Finding("distance", finding.value, finding.limit, f"{text}: that {finding.text}")

    def _ends_in_lane(self, judged: _Judgement) -> bool:
        way = judged.lane
        return way is None or self._own_lane.aside_m(complex(way.own_place[-1])) <= IN_LANE_M

    def _replacement(
        self, ladder: Iterable[_Rung], situation: _Situation, *, leaves: bool
    ) -> tuple[bytes | None, GuardVerdict, str]:
        """The first rung of the ladder that holds: its bytes, its verdict and what it does in words."""
        going = self._going = self._going and self._going.at(situation.now_ns, situation.ros_now_ns)
        if going is not None and situation.motion is None:
            # One trajectory to standstill, and there it ends: begun anew, from the speed of a plan, it
            # would not.
            return going.payload, GuardVerdict.STOP, "the stop goes on"
        judgements: dict[int, _Judgement] = {}  # a path that brakes fully is judged once, under any name
        failed: list[tuple[tuple[bool, float], _Rung]] = []
        for rung in ladder:
            judged = judgements.get(id(rung.path))
            if judged is None:
                judged = judgements[id(rung.path)] = self._judge(rung.path, situation, rung.checks)
            stop = rung.verdict is GuardVerdict.STOP
            lenient = stop or (rung.begun and not judged.closeness.late)
            if judged.failed(rung.checks, unless_contact=lenient) is None:
                goes_on = rung.verdict is GuardVerdict.REBASED
                ends_in_lane = (rung.returns or goes_on) and self._ends_in_lane(judged)
                in_way = judged.closeness.in_way and not (rung.returns and ends_in_lane)
                if leaves and not rung.last and (in_way or (goes_on and not ends_in_lane)):
                    continue  # something comes there, or what was accepted once leaves the lane as well
                self._published = None
                if (
                    rung.returns and ends_in_lane
                ):  # as a whole: begun anew with each plan, it would never be over
                    self._way_out = (rung.path, situation.ros_now_ns - situation.now_ns)
                if not stop:
                    self._note(rung.path, judged, situation)
                return self._brakes(rung, situation), rung.verdict, rung.does
            if stop or (leaves and rung.verdict is GuardVerdict.BRAKE):
                failed.append((rung.worth(judged), rung))
        if not failed:
            return (
                None,
                GuardVerdict.UNCHECKED,
                "there is nothing to stop along, neither odometry nor an earlier plan",
            )
        failed.sort(key=lambda found: found[1].verdict is not GuardVerdict.STOP)
        undrivable, least = min(worth for worth, _ in failed)
        last = next(one for worth, one in failed if worth <= (undrivable, least + _AS_HARD))
        self._published = None
        does = f"a collision is not avoided by any of it; {last.does}"
        return self._brakes(last, situation), GuardVerdict.UNAVOIDABLE, does

    def _brakes(self, rung: _Rung, situation: _Situation) -> bytes:
        """The bytes of what is published, and remember it if it brakes to standstill."""
        if rung.verdict is GuardVerdict.REBASED or not rung.path.stops:
            self._going = None
            return rung.path.bytes()
        self._going = GoingStop.begun(rung.path, situation.now_ns, situation.ros_now_ns)
        self._braked_from = situation.motion
        return self._going.payload

    def _ladder(
        self,
        path: TimedPath | None,
        situation: _Situation,
        home: list[_Rung],
        *,
        goes_on: bool,
        leaves: bool,
    ) -> Iterator[_Rung]:
        """What may replace a plan, best first.

        Args:
            path: the plan; None: it cannot be followed at all.
            situation: what is known.
            home: see `_ways_home`.
            goes_on: whether the stage still plans, so that an earlier plan may go on.
            leaves: whether the plan leaves the lane into the way of something: then braking along it comes
                last.
        """
        options, now_ns, motion = self._options, situation.ros_now_ns, situation.motion
        on_path, hard, hardest = options.act - _BY_BRAKING, options.rss_brake, options.max_deceleration
        aside, brakes, stops = on_path - {"jump"}, GuardVerdict.BRAKE, GuardVerdict.STOP
        same = [] if path is None else [(by, self._braked(path, situation, by)) for by in (hard, hardest)]
        on_same = [
            _Rung(brakes, one, on_path, f"brakes by {by:g} m/s^2 on the same path")
            for by, one in same
            if one
        ]
        yield from () if leaves and goes_on else home
        yield from () if leaves else on_same
        yield from self._begun_way_out(situation) if leaves else ()
        valid = self._last_valid(situation)
        still_ns = now_ns + options.start_tolerance_s * NS_PER_S
        goes_on = goes_on and (
            self._going is None or (valid is not None and self._as_fast_as(valid, situation))
        )
        if (
            goes_on
            and valid is not None
            and valid.stamps_ns[0] <= now_ns
            and valid.stamps_ns[-1] >= still_ns
        ):
            checks = options.act - {"jump"} | {"start"}  # the vehicle may have left it meanwhile
            yield _Rung(
                GuardVerdict.REBASED,
                valid.cut(now_ns),
                checks,
                "the last valid plan goes on",
            )
        back: list[_Rung] = []
        if leaves and motion is not None:
            back = self._ways_back(motion, situation)
            ways = [*back]
            if (braked := self._braked_along_valid(valid, situation, hard)) is not None:
                ways.append(
                    _Rung(brakes, braked, aside, f"brakes by {hard:g} m/s^2 along the last valid plan")
                )
            arc, does = (
                self._arc(motion, situation, hard),
                f"brakes by {hard:g} m/s^2 in the bend that it drives",
            )
            ways += [_Rung(brakes, arc, options.act & {"distance"}, does), *on_same]
            yield from ways
            yield from (rung._replace(last=True) for rung in ways)
        last = [
            rung._replace(verdict=stops, does=rung.does.replace("brakes", "stops", 1))
            for rung in on_same[-1:]
        ]
        yield from () if leaves else last
        if (braked := self._braked_along_valid(valid, situation, hardest)) is not None:
            yield _Rung(stops, braked, aside, f"stops by {hardest:g} m/s^2 along the last valid plan")
        for rung in (one for one in reversed(back) if one.path.stops):  # the hardest first
            yield rung._replace(verdict=stops, does=rung.does.replace("brakes by", "stops by"))
        if motion is not None:
            arc = self._arc(motion, situation, hardest)
            yield _Rung(
                stops,
                arc,
                options.act & {"distance"},
                f"stops by {hardest:g} m/s^2 in the bend that it drives",
            )
        yield from last if leaves else ()

    def _ways_back(self, motion: Motion, situation: _Situation) -> list[_Rung]:
        options = self._options
        x, y, yaw = motion.after(situation.motion_age_s)
        ways = self._own_lane.ways_back(
            replace(motion, x=x, y=y, yaw=yaw),
            self._speed(situation) or 0.0,
            situation.ros_now_ns,
            options.rss_brake,
            options.max_deceleration,
        )
        checks = options.act - _BY_BRAKING - {"jump"}
        return [_Rung(GuardVerdict.BRAKE, one, checks, does, returns=True) for one, does in ways]

    def _begun_way_out(self, situation: _Situation) -> list[_Rung]:
        """What is left of the way out of the way of what comes, in the ROS time of now."""
        if self._way_out is None:
            return []
        path, now_ns = self._in_ros_time(self._way_out, situation), situation.ros_now_ns
        if not (path.stamps_ns[0] <= now_ns < path.stamps_ns[-2] and self._as_fast_as(path, situation)):
            return []
        checks, does = self._options.act & {"start", "distance"}, "goes on back into its lane"
        return [_Rung(GuardVerdict.BRAKE, path.cut(now_ns), checks, does, returns=True, begun=True)]

    @staticmethod
    def _in_ros_time(kept: tuple[TimedPath, int], situation: _Situation) -> TimedPath:
        """A path, kept with how far the ROS clock was ahead: a step of that clock moves no place on it."""
        return kept[0].moved(situation.ros_now_ns - situation.now_ns - kept[1])

    def _ways_home(self, path: TimedPath | None, situation: _Situation, *, has_ended: bool) -> list[_Rung]:
        """Ways that end in the lane, shortest first, of a vehicle whose planner has given up.

        Only where braking along the plan, or along the last valid one, would end beside the lane. A vehicle that
        stands there stays, unless something comes in whose way it is: it may be parked. So does one whose plan turns
        off the road.
        """
        motion, valid, hardest = (
            situation.motion,
            self._last_valid(situation),
            self._options.max_deceleration,
        )
        stop = self._braked_along_valid(valid, situation, hardest)
        if path is not None:
            stop = self._braked(path, situation, hardest)
        if motion is None or not math.isfinite(motion.speed) or motion.speed < -_STANDS:
            return []
        if stop is None:
            stop = self._arc(motion, situation, hardest)
        ends = [
            self._own_lane.is_beside(track.place[-1], track.yaw[-1])
            for one in (stop, valid)
            if one is not None
            for track in [Track.of(one, situation.ros_now_ns, motion, situation.motion_age_s)]
        ]
        begun = self._begun_way_out(situation)
        # Back in the lane, a way out brakes so gently that it leads far beyond what is known of the lane.
        is_back = (
            has_ended
            and any(rung.path.stops for rung in begun)
            and self._own_lane.aside_m(complex(*motion.after(situation.motion_age_s)[:2])) <= IN_LANE_M
        )
        if None in ends or not (ends[0] or is_back):
            return []
        if (self._speed(situation) or 0.0) < _ROLLS and not self._is_in_way(motion, situation):
            return []
        ways = [
            (float(np.abs(np.diff(rung.path.points, axis=0)).sum()), rung)
            for rung in self._ways_back(motion, situation)
            if self._own_lane.aside_m(complex(*rung.path.points[-1, :2])) <= IN_LANE_M
        ]
        home = [rung for _, rung in sorted(ways, key=lambda way: way[0])]
        return home + begun if is_back else begun + home

    def _is_in_way(self, motion: Motion, situation: _Situation) -> bool:
        """Whether something comes towards a vehicle that stands, in its way."""
        x, y, yaw = motion.after(situation.motion_age_s)
        ways = _ROLLS * _PROBES_S
        points = np.stack(
            (x + ways * math.cos(yaw), y + ways * math.sin(yaw), np.full_like(ways, motion.z)), 1
        )
        stamps_ns = situation.ros_now_ns + np.rint(_PROBES_S * NS_PER_S).astype(np.int64)
        probe = TimedPath.made(stamps_ns, points, np.full_like(ways, yaw), motion.frame)
        return self._judge(probe, situation, frozenset({"distance"})).closeness.in_way

    def _as_fast_as(self, path: TimedPath, situation: _Situation) -> bool:
        """Whether the vehicle, which was braked meanwhile, is still as fast as a path is now."""
        speed = self._speed(situation)
        return speed is None or abs(path.speed_at(situation.ros_now_ns) - speed) <= _AS_FAST

    def _last_valid(self, situation: _Situation) -> TimedPath | None:
        """The last plan that was accepted, in the ROS time of now.

        A step of that clock moves no place on it.
        """
        if self._valid is None:
            return None
        path, motion = self._in_ros_time(self._valid, situation), situation.motion
        if motion is not None and path.frame not in {motion.frame, motion.child_frame}:
            return None  # it went out unchecked, and cannot be checked now
        return path

    def _speed(self, situation: _Situation) -> float | None:
        """How fast the vehicle is in m/s; None: it is not known.

        Odometry that a braking path was made of already is from before the braking, so that path says it.
        """
        motion, going = situation.motion, self._going
        if going is not None and motion is self._braked_from:
            return going.path.speed_at(situation.ros_now_ns)
        return None if motion is None else abs(motion.speed)

    def _braked(self, path: TimedPath, situation: _Situation, deceleration: float) -> TimedPath | None:
        """From now on along a path, from the vehicle's own speed where that is known.

        None where it does not lead on from here: it is over, or the vehicle rolls the other way.
        """
        start_ns = max(situation.ros_now_ns, int(path.stamps_ns[0]))
        if start_ns >= path.stamps_ns[-1] or self._rolls_away(path, situation):
            return None
        count = min(max(len(path.stamps_ns), _STOP_POSES), _MOST_STOP_POSES)
        return path.braked(start_ns, deceleration, count, speed=self._speed(situation))

    def _braked_along_valid(
        self, valid: TimedPath | None, situation: _Situation, deceleration: float
    ) -> TimedPath | None:
        """The same along the last valid plan, from where the vehicle is on it.

        The vehicle was braked since that plan went out, so it is behind the place that the plan has for now. Braking
        from that place would lead it on: a vehicle that stands would be asked to stand further ahead each time.
        """
        if valid is None:
            return None
        if situation.motion is not None:
            x, y, _ = situation.motion.after(situation.motion_age_s)
            valid = valid.begun_at(complex(x, y), situation.ros_now_ns, self._options.start_tolerance_m)
        return self._braked(valid, situation, deceleration)

    @staticmethod
    def _rolls_away(path: TimedPath, situation: _Situation) -> bool:
        """Whether the vehicle moves, but not in the direction in which the path goes on, forward or backward."""
        motion = situation.motion
        if motion is None or abs(motion.speed) <= _STANDS:
            return False
        track = Track.of(path, situation.ros_now_ns, motion, situation.motion_age_s)
        forward = ((track.place[1:] - track.place[:-1]) * unit(-track.yaw[:-1])).real
        moves = forward[(np.abs(forward) > _MOVES_M) & (track.t_s[1:] > 0.0)]
        return not len(moves) or bool(moves[0] * motion.speed < 0)

    def _arc(self, motion: Motion, situation: _Situation, deceleration: float) -> TimedPath:
        """Braking from where the vehicle is now, forward or backward, as it turns now."""
        options, speed = self._options, self._speed(situation) or 0.0
        x, y, yaw = motion.after(situation.motion_age_s)
        most = options.vehicle.max_curvature * abs(motion.speed)
        here = replace(motion, x=x, y=y, yaw=yaw, yaw_rate=min(max(motion.yaw_rate, -most), most))
        times_s = np.linspace(0.0, abs(motion.speed) / deceleration + 1.0, _STOP_POSES)
        x, y, yaw = here.after(times_s)
        points = np.stack((x, y, np.full_like(x, motion.z)), axis=1)
        stamps_ns = situation.ros_now_ns + np.rint(times_s * NS_PER_S).astype(np.int64)
        path = TimedPath.made(stamps_ns, points, yaw, motion.frame)
        return path.braked(situation.ros_now_ns, deceleration, _STOP_POSES, speed=speed)


def _bend_driven(motion: Motion, track: Track) -> float:
    """The curvature that the vehicle drives in 1/m: as near to that with which a plan begins as noise allows.

    Noise alone would make a plan look as if it turned out of what is driven, or into it.
    """
    speed = motion.speed
    if motion.turns is None:
        return motion.yaw_rate / speed
    measured, unsure = motion.turns / speed, motion.unsure / abs(speed)
    way_m = np.zeros(len(track.place))
    np.abs(track.place[1:] - track.place[:-1]).cumsum(out=way_m[1:])
    over_m = _BEGINS * way_m.item(-1)
    if over_m < _BEGINS * _SHOWN_M:
        return measured
    turn = float(np.interp(over_m, way_m, track.yaw)) - track.yaw.item(0)
    return min(max(turn / math.copysign(over_m, speed), measured - unsure), measured + unsure)


def _bend_of(track: Track) -> float:
    """The curvature of a plan in 1/m, positive to the left of where the vehicle looks.

    0 where it shows none.

    A plan that turns as much in its last third as in its first follows a bend of the road; others turn out
    of it.
    """
    steps_m = ((track.place[1:] - track.place[:-1]) * unit(-track.yaw[:-1])).real
    way_m = np.concatenate(([0.0], np.cumsum(np.abs(steps_m))))
    if way_m[-1] < _SHOWN_M:
        return 0.0
    yaws = np.interp(np.linspace(0.0, way_m[-1], 4), way_m, np.unwrap(track.yaw))
    turns = yaws[1:] - yaws[:-1]
    bend = float(yaws[3] - yaws[0]) / float(steps_m.sum()) if abs(steps_m.sum()) >= _SHOWN_M else 0.0
    is_even = abs(float(turns[2] - turns[0])) < _EVEN * abs(float(turns.sum()))
    return bend if is_even and abs(bend) < _TURNS_OFF else 0.0
