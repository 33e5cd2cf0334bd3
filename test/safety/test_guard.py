import json
import math
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from benchmarks.rig.messages import (
    START_NS,
    Box,
    S,
    markers_bytes,
    odometry_bytes,
    plan_bytes,
    straight_plan,
)
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety import guard as guard_module
from torchperf_ros.safety.guard import Guard, Known
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.settings.safety_options import guard_options

from ..stage.conftest import STORE

PATH = "nav_msgs/msg/Path"
MS = S // 1000
T = np.arange(0.0, 3.05, 0.1)
FAR = Box(90.0, 20.0)


class Bench:
    """A guard, its inputs and a clock; x is where the vehicle is, at constant speed."""

    def __init__(self, speed=10.0, boxes=(FAR,), yaw_rate=0.0, **options):
        values = {"act": ["all"], **options}
        self.guard = Guard(guard_options({f"guard.{name}": value for name, value in values.items()}))
        self.after_s = 0.0
        self.speed, self.yaw_rate = speed, yaw_rate
        self.boxes = boxes
        self.feel()

    @property
    def now_ns(self):
        return 10 * S + round(self.after_s * S)

    @property
    def ros_ns(self):
        return START_NS + round(self.after_s * S)

    def feel(self, boxes=None, x=None, odometry=True):
        self.boxes = self.boxes if boxes is None else boxes
        if odometry:
            x = self.speed * self.after_s if x is None else x
            data = odometry_bytes(x, speed=self.speed, yaw_rate=self.yaw_rate, stamp_ns=self.ros_ns)
            self.guard.moved(data, self.now_ns)
        self.guard.saw(0, markers_bytes(self.boxes, stamp_ns=self.ros_ns), self.now_ns)
        return self

    def plan(self, speed=None, acceleration=0.0, **more):
        """A plan from where the vehicle is now, straight on."""
        times_s = np.arange(0.0, 3.05, 0.1)
        speed = self.speed if speed is None else speed
        x = self.speed * self.after_s + speed * times_s + 0.5 * acceleration * times_s**2
        return plan_bytes(
            times_s, x, more.pop("y", 0.0), more.pop("yaw", 0.0), start_ns=self.ros_ns, **more
        )

    def check(self, plan, age_ms=60.0):
        return self.guard.check(plan, self.now_ns, self.ros_ns, age_ms)


def motion_of(payload):
    """Stamps after START_NS in s, x, y and speeds of a published path."""
    path = STORE.deserialize_cdr(payload, PATH)
    times_s = (
        np.array([one.header.stamp.sec * S + one.header.stamp.nanosec - START_NS for one in path.poses]) / S
    )
    x, y = (np.array([getattr(one.pose.position, axis) for one in path.poses]) for axis in "xy")
    return times_s, x, y, np.hypot(np.diff(x), np.diff(y)) / np.diff(times_s)


def test_given_a_good_plan_when_checked_then_its_own_bytes_are_published():
    bench = Bench()
    plan = bench.plan()
    found = bench.check(plan)
    assert found.payload is plan
    assert (found.verdict, found.check, found.reason, found.shadow) == (GuardVerdict.ACCEPT, "", "", "")
    assert all(map(math.isnan, (found.value, found.limit, found.ttc_s, found.needed_deceleration)))
    assert found.verdict.word == "accept"


def test_given_an_obstacle_ahead_when_the_plan_goes_on_then_it_is_braked_on_its_own_path():
    found = Bench(boxes=[Box(30.0, 0.0)]).check(straight_plan())
    assert (found.verdict, found.check) == (GuardVerdict.BRAKE, "distance")
    assert found.value < found.limit == 0.3
    assert found.reason.startswith("distance: the plan comes to -1.9 m from an obstacle 2.")
    assert found.reason.endswith("; brakes by 6 m/s^2 on the same path")
    assert found.ttc_s == pytest.approx((30 - 2.25 - 3.5) / 10)
    assert found.needed_deceleration == pytest.approx(100 / 2 / 24.25)
    times_s, x, y, speeds = motion_of(found.payload)
    assert times_s[0] == 0.0
    assert x[-1] == pytest.approx(100 / 12)
    assert np.diff(speeds)[:3] == pytest.approx(-6 * np.diff(times_s)[:3])
    assert not y.any()


@pytest.mark.parametrize(
    ("way_m", "verdict", "does"),
    [
        (7.25, GuardVerdict.BRAKE, "brakes by 8 m/s^2 on the same path"),
        (100 / 16 + 0.2, GuardVerdict.STOP, "stops by 8 m/s^2 on the same path"),  # only the margin is lost
        (
            2.25,
            GuardVerdict.UNAVOIDABLE,
            "a collision is not avoided by any of it; stops by 8 m/s^2 on the same path",
        ),
    ],
)
def test_given_too_little_way_when_braked_then_it_is_braked_fully_as_far_as_that_helps(
    way_m, verdict, does
):
    found = Bench(boxes=[Box(3.5 + way_m + 2.25, 0.0)]).check(straight_plan())
    assert (found.verdict, found.check) == (verdict, "distance")
    assert found.reason.endswith(f"; {does}")
    assert motion_of(found.payload)[1][-1] == pytest.approx(100 / 16)
    assert found.needed_deceleration == pytest.approx(100 / (2 * way_m))


def test_given_a_lead_that_is_too_close_when_the_plan_brakes_as_rss_asks_then_it_is_accepted():
    bench = Bench(speed=20.0, boxes=[Box(17.0, 0.0, velocity=(18.0, 0.0))])
    refused = bench.check(bench.plan())
    assert (refused.verdict, refused.check) == (GuardVerdict.BRAKE, "distance")
    assert "behind an obstacle" in refused.reason
    assert bench.check(bench.plan(acceleration=-2.0)).verdict is GuardVerdict.BRAKE
    assert bench.check(bench.plan(acceleration=-5.5)).verdict is GuardVerdict.ACCEPT
    assert Bench(speed=20.0, boxes=[Box(60.0, 0.0, velocity=(18.0, 0.0))]).check(bench.plan()).verdict == 0


def test_given_a_slower_answer_when_checked_then_the_safe_distance_grows_by_the_measured_time():
    bench = Bench(speed=20.0, boxes=[Box(26.0, 0.0, velocity=(20.0, 0.0))])
    assert bench.check(bench.plan(), age_ms=0.0).verdict is GuardVerdict.ACCEPT
    assert bench.check(bench.plan(), age_ms=math.nan).verdict is GuardVerdict.ACCEPT
    slow = bench.check(bench.plan(), age_ms=300.0)
    assert slow.verdict is GuardVerdict.BRAKE
    rho = 0.45
    assert slow.limit == pytest.approx(20 * rho + rho**2 + (20 + 2 * rho) ** 2 / 12 - 400 / 16)
    assert slow.value == pytest.approx(26 - 2.25 - 3.5)


def test_given_a_vehicle_that_stands_when_something_comes_to_it_then_it_is_not_its_fault():
    bench = Bench(speed=0.0, boxes=[Box(8.0, 0.0, velocity=(-10.0, 0.0))])
    found = bench.check(bench.plan())
    assert found.verdict is GuardVerdict.ACCEPT
    assert found.ttc_s == pytest.approx((8 - 2.25 - 3.5) / 10)
    assert found.needed_deceleration == 0.0
    assert bench.check(None).verdict is GuardVerdict.STOP
    assert bench.check(bench.plan(acceleration=2.0)).verdict is GuardVerdict.BRAKE


def test_given_a_follower_when_we_brake_then_keeping_the_distance_is_its_part():
    bench = Bench(boxes=[Box(-6.0, 0.0, velocity=(14.0, 0.0))])
    assert bench.check(straight_plan(acceleration=-3.0)).verdict is GuardVerdict.ACCEPT
    beside = Bench(boxes=[Box(-6.0, 3.5, velocity=(14.0, 0.0))])
    y = np.minimum(1.2 * T, 3.5)  # a change of lanes into its way
    cut_in = plan_bytes(T, 10 * T, y, np.where(y < 3.5, math.atan(0.12), 0.0))
    assert beside.check(straight_plan()).verdict is GuardVerdict.ACCEPT
    assert (
        Bench(boxes=[Box(-6.0, 3.5, velocity=(14.0, 0.0))], act=["distance"]).check(cut_in).check
        == "distance"
    )


def test_given_a_plan_that_is_no_plan_when_one_was_good_then_the_good_one_goes_on_as_long_as_it_lasts():
    bench = Bench()
    good = bench.plan()
    assert bench.check(good).verdict is GuardVerdict.ACCEPT
    bench.after_s = 1.0
    found = bench.feel().check(b"nonsense")
    assert (found.verdict, found.check) == (GuardVerdict.REBASED, "finite")
    assert found.reason.startswith(
        "finite: the plan is no nav_msgs/Path of 8 bytes: error: unpack_from requires"
    )
    assert found.reason.endswith("; the last valid plan goes on")
    times_s, x, _, speeds = motion_of(found.payload)
    assert (times_s[0], times_s[-1]) == (1.0, 3.0)
    assert x[0] == pytest.approx(10.0)
    assert speeds == pytest.approx(10.0)
    bench.after_s = 1.1
    blocked = bench.feel(boxes=[Box(30.0, 0.0)]).check(b"nonsense")
    assert blocked.verdict is GuardVerdict.STOP  # that plan is checked again, against the obstacles of now
    assert "along the last valid plan" in blocked.reason
    bench.after_s = 2.81
    over = bench.feel(boxes=[FAR]).check(b"nonsense")
    assert over.verdict is GuardVerdict.STOP
    bench.after_s = 3.5
    over = bench.feel().check(b"nonsense")
    assert over.reason.endswith("stops by 8 m/s^2 in the bend that it drives")


def test_given_no_plan_when_the_vehicle_drives_a_bend_then_the_stop_is_in_that_bend():
    bench = Bench(yaw_rate=0.5)
    bench.after_s = 0.1
    found = bench.check(None)
    assert (found.verdict, found.check) == (GuardVerdict.STOP, "")
    assert found.reason == "there is no plan; stops by 8 m/s^2 in the bend that it drives"
    times_s, x, y, speeds = motion_of(found.payload)
    assert len(times_s) == 31
    assert times_s[0] == pytest.approx(0.1)
    assert (x[0], y[0]) == pytest.approx(
        (20 * math.sin(0.05), 20 * (1 - math.cos(0.05)))
    )  # led on by 0.1 s
    assert x[-1] == pytest.approx(20 * math.sin(0.05 + 6.25 / 20), abs=0.01)
    assert np.diff(speeds)[:5] == pytest.approx(-8 * np.diff(times_s)[:5], rel=0.02)
    assert STORE.deserialize_cdr(found.payload, PATH).header.frame_id == "odom"


def test_given_nothing_at_all_when_checked_then_nothing_is_published_and_it_is_said_why():
    guard = Guard(guard_options({"guard.act": ["all"]}))
    found = guard.check(None, 0, START_NS, 60.0)
    assert (found.payload, found.verdict) == (None, GuardVerdict.UNCHECKED)
    assert (
        found.reason
        == "there is no plan; there is nothing to stop along, neither odometry nor an earlier plan"
    )


def test_given_no_odometry_when_the_plan_itself_is_fine_then_it_goes_out_unchecked():
    guard = Guard(guard_options({"guard.act": ["all"]}))
    plan = straight_plan()
    found = guard.check(plan, 10 * S, START_NS, 60.0)
    assert (found.payload, found.verdict, found.check) == (plan, GuardVerdict.UNCHECKED, "")
    assert found.reason == "no odometry was received"
    guard.moved(b"x", 0)
    assert (
        "no odometry was received (refused: 1 bytes are no"
        in guard.check(plan, 10 * S, START_NS, 60.0).reason
    )
    guard.moved(b"x", 0)
    assert guard.refused["odometry"] == 2
    too_fast = guard.check(straight_plan(speed=50.0), 10 * S, START_NS, 60.0)
    assert (too_fast.verdict, too_fast.check) == (GuardVerdict.BRAKE, "speed")
    assert "50 m/s at pose" in too_fast.reason
    assert "no odometry" in too_fast.reason


def test_given_no_odometry_when_a_stop_has_begun_then_it_goes_on_and_does_not_begin_anew():
    guard = Guard(guard_options({"guard.act": ["all"]}))
    guard.check(straight_plan(), 10 * S, START_NS, 60.0)
    first = guard.check(None, 10 * S + S // 2, START_NS + S // 2, 60.0)
    assert first.verdict is GuardVerdict.STOP
    second = guard.check(None, 10 * S + S, START_NS + S, 60.0)
    assert second.payload == first.payload
    assert second.reason == "there is no plan; the stop goes on"


@pytest.mark.parametrize(
    ("stale", "old_ms", "unchecked"),
    [
        ("odometry is", 200, False),
        ("odometry is", 201, True),
        ("obstacles on detections are", 300, False),
        ("obstacles on detections are", 301, True),
    ],
)
def test_given_odometry_or_obstacles_when_they_are_old_then_the_plan_is_unchecked(stale, old_ms, unchecked):
    bench = Bench()
    bench.after_s = old_ms / 1000
    if stale == "odometry is":
        bench.feel(odometry=False)
    else:
        bench.guard.moved(odometry_bytes(10.0 * bench.after_s, stamp_ns=bench.ros_ns), bench.now_ns)
    found = bench.check(bench.plan())
    assert (found.verdict is GuardVerdict.UNCHECKED) == unchecked
    assert found.reason == (f"{stale} {old_ms} ms old" if unchecked else "")
    if stale == "odometry is":
        bench.guard.moved(b"junk", bench.now_ns)
        assert ("(refused: 4 bytes are no" in bench.check(bench.plan()).reason) == unchecked


def test_given_two_sources_when_one_is_missing_then_the_other_still_acts():
    bench = Bench(obstacles=["a", "b"])
    found = bench.check(bench.plan())
    assert (found.verdict, found.reason) == (GuardVerdict.UNCHECKED, "obstacles on b were not received")
    bench.guard.saw(1, b"junk", 10 * S)
    assert (
        "obstacles on b were not received (refused: obstacles: 4 bytes are no"
        in bench.check(bench.plan()).reason
    )
    assert bench.guard.refused["obstacles 1"] == 1
    found = bench.feel(boxes=[Box(30.0, 0.0)]).check(bench.plan())
    assert found.verdict is GuardVerdict.BRAKE
    bench.guard.saw(1, markers_bytes([Box(28.0, 0.0, velocity=None)]), 10 * S)
    assert bench.feel(boxes=[FAR]).check(bench.plan()).verdict is GuardVerdict.BRAKE
    assert bench.guard.refused["no_velocity"] == 1
    bench.guard.saw(1, markers_bytes([Box(28.0, 0.0, velocity=None)]), 10 * S)
    assert bench.guard.refused["no_velocity"] == 2


def test_given_two_sources_when_one_is_read_meanwhile_then_neither_array_is_lost(monkeypatch):
    bench, read = Bench(obstacles=["a", "b"]), guard_module.read_obstacles
    near, far = markers_bytes([Box(8.0, 0.0)]), markers_bytes([FAR])

    def read_slowly(message, *rest):
        found = read(message, *rest)
        if message is far:  # on the thread of a; meanwhile b delivers, on its own
            bench.guard.saw(1, near, 10 * S)
            bench.guard.saw(1, b"junk", 10 * S)
            bench.guard.saw(1, near, 10 * S)
        return found

    monkeypatch.setattr(guard_module, "read_obstacles", read_slowly)
    bench.guard.saw(0, far, 10 * S)
    found = bench.check(bench.plan())
    assert (found.verdict, found.check) == (GuardVerdict.UNAVOIDABLE, "distance")
    assert bench.guard.refused["obstacles 1"] == 1


def test_given_threads_of_two_sources_when_arrays_coincide_then_each_is_there_and_every_refusal_is_counted():
    bench, rounds = Bench(obstacles=["a", "b"]), 100
    arrays = [markers_bytes([Box(float(x), 30.0) for x in range(20)]), b"junk"]
    turn, lost = threading.Barrier(2), []

    def deliver(source):
        for number in range(rounds):
            turn.wait(60)
            for array in arrays:
                bench.guard.saw(source, array, 10 * S + number)
            seen = bench.guard._sources[source]
            if seen is None or seen.received_ns != 10 * S + number:
                lost.append((source, number))

    threads = [threading.Thread(target=deliver, args=(source,)) for source in (0, 1)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert lost == []
    assert [bench.guard.refused[f"obstacles {source}"] for source in (0, 1)] == [rounds] * 2


def test_given_an_array_that_cannot_be_read_when_checked_then_the_one_before_counts_and_proves_nothing():
    bench = Bench(boxes=[Box(30.0, 0.0)])
    bench.guard.saw(0, b"junk", bench.now_ns)
    assert bench.check(bench.plan()).verdict is GuardVerdict.BRAKE
    bench.feel(boxes=[FAR])
    assert bench.check(bench.plan()).verdict is GuardVerdict.ACCEPT
    bench.guard.saw(0, b"junk", bench.now_ns)
    found = bench.check(bench.plan())
    assert found.verdict is GuardVerdict.UNCHECKED
    assert found.reason.startswith(
        "obstacles on detections cannot be read since then (refused: obstacles: 4 bytes are"
    )
    assert bench.feel().check(bench.plan()).verdict is GuardVerdict.ACCEPT
    assert bench.guard.refused["obstacles 0"] == 2


def test_given_a_marker_that_cannot_be_read_when_checked_then_the_rest_is_judged_and_it_is_counted():
    bench = Bench()
    stray = Box(15.0, 30.0, length=math.nan)
    found = bench.feel(boxes=[FAR, stray]).check(bench.plan())
    assert found.verdict is GuardVerdict.UNCHECKED
    assert found.reason.startswith(
        "obstacles on detections have a part that cannot be read (marker 'car' 1: the size"
    )
    assert (bench.guard.refused["obstacles 0"], bench.guard.refused["obstacles 0 markers"]) == (1, 1)
    assert bench.feel(boxes=[Box(30.0, 0.0), stray]).check(bench.plan()).verdict is GuardVerdict.BRAKE
    assert (
        bench.feel(boxes=[FAR, stray._replace(y=520.0)]).check(bench.plan()).verdict is GuardVerdict.ACCEPT
    )
    assert bench.guard.refused["obstacles 0 markers"] == 3


@pytest.mark.parametrize("old_s", [0.35, 9.9, 10.1, 60.0, 3000.0])
def test_given_odometry_or_obstacles_that_are_old_when_they_arrive_then_the_plan_is_unchecked(old_s):
    guard, then_ns = Guard(guard_options({"guard.act": ["all"]})), START_NS - round(old_s * S)
    for arrays in (1, 2):
        guard.moved(odometry_bytes(), 10 * S)
        guard.saw(0, markers_bytes([FAR], stamp_ns=then_ns), 10 * S)
        found = guard.check(straight_plan(), 10 * S, START_NS, 60.0)
        assert (found.verdict, found.reason) == (
            GuardVerdict.UNCHECKED,
            f"obstacles on detections are {1000 * old_s:.0f} ms old",
        ), arrays
    guard.saw(0, markers_bytes([FAR]), 10 * S)
    assert guard.check(straight_plan(), 10 * S, START_NS, 60.0).verdict is GuardVerdict.ACCEPT
    guard.forget(0)
    guard.moved(odometry_bytes(stamp_ns=then_ns), 10 * S)
    guard.saw(0, markers_bytes([FAR]), 10 * S)
    assert (
        f"odometry is {1000 * old_s:.0f} ms old"
        in guard.check(straight_plan(), 10 * S, START_NS, 60.0).reason
    )


def test_given_sources_in_another_clock_when_learned_then_it_is_said_once_and_their_progress_counts():
    guard = Guard(guard_options({"guard.act": ["all"]}))

    def check(after_s, late_s=0.0):
        now_ns, ros_ns = (start_ns + round(after_s * S) for start_ns in (10 * S, START_NS))
        stamp_ns = 5 * S + round((after_s - late_s) * S)
        x = 10.0 * (after_s - late_s)
        guard.moved(odometry_bytes(x, stamp_ns=stamp_ns), now_ns)
        guard.saw(0, markers_bytes([FAR], stamp_ns=stamp_ns), now_ns)
        plan = plan_bytes(T, 10 * T + 10 * after_s, 0.0, 0.0, start_ns=ros_ns)
        return guard.check(plan, now_ns, ros_ns, 60.0)

    assert check(0.0).verdict is GuardVerdict.ACCEPT
    off = "its own, 1.7e+09 s behind ROS time"
    assert (guard.refused["odometry clock"], guard.refused["obstacles 0 clock"]) == (off, off)
    assert list(guard.news) == [
        f"{name}: the clock of its stamps is {off}; its receipt counts, and their progress"
        for name in ("odometry", "obstacles on detections")
    ]
    guard.news.clear()
    assert check(0.1).verdict is GuardVerdict.ACCEPT
    assert (
        check(0.3, late_s=0.15).verdict is GuardVerdict.ACCEPT
    )  # it begins where 150 ms of lag have led the vehicle
    late = check(13.0, late_s=12.0)
    assert late.verdict is GuardVerdict.UNCHECKED
    assert late.reason == "odometry is 11987 ms old"  # of 12 s the guard forgets 1 ms in each second
    assert (
        "obstacles on detections are 11987 ms old"
        in guard.known(23 * S, START_NS + 13 * S, 60.0).situation.no_obstacles
    )
    assert check(14.0).verdict is GuardVerdict.ACCEPT
    assert not guard.news


def test_given_what_is_known_when_sent_elsewhere_then_another_plan_is_judged_by_the_same():
    bench = Bench(boxes=[Box(30.0, 1.0, 0.2, velocity=(1.0, 0.5)), FAR])
    known = bench.guard.known(bench.now_ns, bench.ros_ns, 60.0)
    sent = Known.unpacked(json.loads(json.dumps(known.packed())))
    assert sent.packed() == known.packed()
    assert Guard.refusal(bench.plan(), sent) == Guard.refusal(bench.plan(), known) != ""
    assert Guard.refusal(bench.plan(speed=1.0), sent).startswith("start: ")
    nothing = Guard(guard_options({"guard.act": ["all"]})).known(bench.now_ns, bench.ros_ns, math.nan)
    assert Guard.refusal(bench.plan(), Known.unpacked(json.loads(json.dumps(nothing.packed())))) == ""


def test_given_no_arrows_when_arrays_follow_one_another_then_velocities_are_found_from_the_source_itself():
    bench = Bench(obstacles=["a", "b"])
    for number in range(4):
        bench.after_s = 0.1 * number
        bench.feel(boxes=[Box(50.0 + number, 0.0, velocity=None)])
    assert bench.guard.refused["no_velocity"] == 2


def test_given_odometry_without_a_stamp_when_checked_then_it_is_as_old_as_its_receipt():
    bench = Bench(start_tolerance_m=0.1)
    bench.guard.moved(odometry_bytes(stamp_ns=0), 10 * S)
    bench.after_s = 0.15
    assert bench.check(bench.plan()).verdict is GuardVerdict.ACCEPT
    found = bench.check(plan_bytes(T, 10 * T, 0.0, 0.0, start_ns=bench.ros_ns))
    assert (found.check, found.value) == ("start", pytest.approx(1.5))


def test_given_a_last_valid_plan_when_it_is_almost_over_then_it_does_not_go_on():
    bench = Bench(act=["jump"])
    bench.check(bench.plan())
    for after_s, verdict in ((2.79, GuardVerdict.REBASED), (2.81, GuardVerdict.STOP)):
        bench.after_s = after_s
        found = bench.check(b"junk")
        assert (found.verdict, found.check) == (verdict, "finite")
        assert math.isnan(found.value)
        assert math.isnan(found.limit)


def test_given_another_frame_when_checked_then_the_reason_says_that_tf_is_not_looked_up():
    bench = Bench(boxes=[Box(10.0, 0.0)])
    found = bench.check(bench.plan(frame="map"))
    assert found.verdict is GuardVerdict.UNCHECKED
    assert (
        found.reason == "the plan's frame_id 'map' is not the odometry's, 'odom', and tf is not looked up"
    )
    assert bench.check(bench.plan(frame="base_link")).verdict is GuardVerdict.UNAVOIDABLE
    odd = bench.plan().replace(b"odom\0", b"od\xffm\0")
    assert "frame_id 'od\ufffdm' is not the odometry's" in bench.check(odd).reason


@pytest.mark.parametrize(
    ("header", "poses", "reason"),
    [
        ("odom", "", "distance: the plan comes to -1.9 m"),
        ("", "odom", "distance: the plan comes to -1.9 m"),
        ("map", "odom", "the plan's frame_id 'map and odom' is not the odometry's, 'odom'"),
        ("odom", "map", "the plan's frame_id 'map and odom' is not the odometry's, 'odom'"),
        ("map", "", "the plan's frame_id 'map' is not the odometry's, 'odom'"),
        ("", "", "the plan's frame_id '' is not the odometry's, 'odom'"),
    ],
)
@pytest.mark.parametrize("child", ["", "base_link"])
def test_given_names_of_frames_that_differ_or_are_empty_when_checked_then_no_plan_is_judged_in_the_wrong_one(
    header, poses, reason, child
):
    bench = Bench(boxes=[Box(30.0, 0.0)])
    bench.guard.moved(odometry_bytes(stamp_ns=bench.ros_ns, child=child), bench.now_ns)
    plan = STORE.deserialize_cdr(bench.plan(frame=poses), PATH)
    plan.header.frame_id = header
    assert bench.check(bytes(STORE.serialize_cdr(plan, PATH))).reason.startswith(reason)


@pytest.mark.parametrize(
    ("plan", "check", "text"),
    [
        (plan_bytes(T[:2], T[:2], 0.0, 0.0)[:60], "finite", "is no nav_msgs/Path of 60 bytes"),
        (b"", "finite", "is no nav_msgs/Path of 0 bytes"),
        (
            straight_plan(horizon_s=99_999, step_s=1.0),
            "finite",
            "has 100000 poses; it has to have 2 to 10000",
        ),
        (
            plan_bytes(T, np.where(T > 1, math.inf, T), 0.0, 0.0),
            "finite",
            "has 20 poses with a value that is NaN, inf",
        ),
        (
            plan_bytes(T, T, np.where(T > 2.95, math.nan, 0.0), 0.0),
            "finite",
            "has 1 poses with a value that is NaN",
        ),
        (
            plan_bytes(T, T, 0.0, 0.0).replace(b"odom", b"odim", 3),
            "finite",
            "poses that do not share one frame_id",
        ),
        (plan_bytes(0 * T, 10 * T, 0.0, 0.0), "stamps", "stamps pose 1 0 s after the one before"),
        (plan_bytes(-T, 10 * T, 0.0, 0.0), "stamps", "-0.1 s after the one before"),
        (straight_plan(start_ns=START_NS + S), "start", "begins 1 s from now"),
        (straight_plan(start_ns=START_NS - 60 * S), "start", "ends -57 s from now, still moving"),
        (plan_bytes(T, 10 * T + 5.0, 0.0, 0.0), "start", "is 5 m from where the vehicle is"),
        (plan_bytes(T, 10 * T, 0.0, 0.3 * T), "lateral", "3 m/s^2 sideways"),
    ],
    ids=range(12),
)
def test_given_a_bad_plan_when_checked_then_it_is_never_published_and_the_reason_is_clear(
    plan, check, text
):
    bench = Bench(max_lateral=2.5)
    found = bench.check(plan)
    assert found.check == check
    assert text in found.reason
    assert found.verdict in {GuardVerdict.BRAKE, GuardVerdict.STOP}
    assert found.payload not in {None, plan}
    assert bench.check(bench.plan()).verdict is GuardVerdict.ACCEPT  # nothing else is disturbed


@pytest.mark.parametrize("count", [0, 1])
def test_given_a_plan_of_less_than_two_poses_when_checked_then_it_is_refused(count):
    message = STORE.deserialize_cdr(straight_plan(), PATH)
    message.poses = message.poses[:count]
    found = Bench().check(bytes(STORE.serialize_cdr(message, PATH)))
    assert found.reason.startswith(f"finite: the plan has {count} poses; it has to have 2 to 10000")


def test_given_big_endian_bytes_when_checked_then_they_mean_the_same():
    bench = Bench(boxes=[Box(30.0, 0.0)])
    turned = bytes(
        STORE.serialize_cdr(STORE.deserialize_cdr(straight_plan(), PATH), PATH, little_endian=False)
    )
    one, other = bench.check(straight_plan()), bench.check(turned)
    assert (one.verdict, one.value, one.ttc_s) == (other.verdict, other.value, other.ttc_s)
    assert motion_of(other.payload)[1] == pytest.approx(motion_of(one.payload)[1])


def test_given_a_sideways_step_when_the_last_plan_led_elsewhere_then_it_jumps():
    bench = Bench()
    bench.check(bench.plan())
    bench.after_s = 0.1
    y = np.minimum(3.0 * T, 2.0)
    found = bench.feel().check(bench.plan(y=y, yaw=np.where(y < 2.0, math.atan(0.3), 0.0)))
    assert found.check in {"jump", "lateral", "curvature", "jerk"}
    aside = Bench(act=["jump"])
    aside.check(aside.plan())
    found = aside.check(aside.plan(y=-1.25))
    assert (found.verdict, found.check) == (GuardVerdict.REBASED, "jump")
    assert (found.value, found.limit) == (pytest.approx(1.25), 1.0)
    assert found.reason.startswith("jump: the plan leads 1.25 m aside of the last one; 1 m are allowed; ")
    assert aside.check(aside.plan(y=1.0)).verdict is GuardVerdict.ACCEPT
    aside.after_s = 1.0
    assert aside.feel().check(aside.plan(y=3.0)).check == "jump"
    aside.check(aside.plan(y=0.9))
    aside.after_s = 2.01
    assert aside.feel().check(aside.plan(y=3.0)).verdict is GuardVerdict.ACCEPT  # forgotten after a second
    aside.check(aside.plan(y=3.0, frame="map"))
    assert aside.check(aside.plan(y=0.0)).verdict is GuardVerdict.ACCEPT  # of another frame


@pytest.mark.parametrize("act", [["jump"], ["all"]])
def test_given_a_frame_that_is_not_the_odometrys_when_a_plan_jumps_in_it_then_that_is_found(act):
    bench = Bench(act=act)
    bench.check(bench.plan(frame="map"))
    assert bench.check(bench.plan(frame="map", y=0.9)).verdict in {
        GuardVerdict.ACCEPT,
        GuardVerdict.UNCHECKED,
    }
    assert bench.check(bench.plan(frame="map", y=2.0)).check == "jump"


@pytest.mark.parametrize("speed", [10.0, 13.0])
def test_given_braked_plans_when_they_lead_aside_bit_by_bit_then_the_last_valid_one_may_go_on(speed):
    bench = Bench(act=["jump", "speed"], speed=speed)
    bench.check(bench.plan())
    for y in (0.9, 1.8):
        found = bench.check(bench.plan(speed=50.0, y=y))
        assert (found.verdict, found.check) == (GuardVerdict.BRAKE, "speed")
        assert motion_of(found.payload)[3][0] == pytest.approx(
            speed, rel=0.05
        )  # the vehicle's, not the plan's
    assert bench.check(b"junk").verdict is GuardVerdict.REBASED  # 1.8 m aside of what was published last


def test_given_a_braked_plan_when_the_next_leads_elsewhere_then_it_jumps():
    bench = Bench(act=["jump", "speed"])
    bench.check(bench.plan())
    assert bench.check(bench.plan(speed=50.0, y=0.9)).verdict is GuardVerdict.BRAKE
    found = bench.check(bench.plan(y=-0.2))
    assert (found.check, found.value) == ("jump", pytest.approx(1.1))


def test_given_braked_plans_that_led_aside_when_there_is_none_then_it_stops_along_the_last_valid_one():
    bench = Bench(act=["jump", "speed"])
    bench.check(bench.plan())
    for y in (0.9, 1.8):
        bench.check(bench.plan(speed=50.0, y=y))
    assert bench.check(None).reason == "there is no plan; stops by 8 m/s^2 along the last valid plan"


def test_given_no_way_out_when_the_plan_itself_cannot_be_driven_then_the_stop_is_in_the_lane():
    turned = 10 * T * 0.1  # 10 m/s^2 sideways
    plan = plan_bytes(T, np.sin(turned) / 0.1, (1 - np.cos(turned)) / 0.1, turned)
    found = Bench(boxes=[Box(8.0, 0.0)]).check(plan)
    assert found.verdict is GuardVerdict.UNAVOIDABLE
    assert found.reason.endswith("a collision is not avoided by any of it; stops by 8 m/s^2 in its lane")


def test_given_a_plan_in_the_vehicles_own_frame_when_checked_then_it_is_judged_where_the_vehicle_is():
    bench = Bench(boxes=[Box(130.0, 0.0)])
    bench.feel(x=100.0)
    plan = plan_bytes(T, 10 * T, 0.0, 0.0, frame="base_link", start_ns=bench.ros_ns)
    found = bench.check(plan)
    assert (found.verdict, found.check) == (GuardVerdict.BRAKE, "distance")
    assert found.ttc_s == pytest.approx((30 - 2.25 - 3.5) / 10)
    assert bench.feel(boxes=[Box(30.0, 0.0)], x=100.0).check(plan).verdict is GuardVerdict.ACCEPT


def test_given_shadow_checks_when_they_fail_then_the_plan_goes_out_and_it_is_said():
    bench = Bench(act=[""], shadow=["all"], boxes=[Box(20.0, 0.0)])
    assert not bench.guard.acts
    assert Bench().guard.acts
    plan = straight_plan()
    found = bench.check(plan)
    assert (found.payload, found.verdict, found.reason) == (plan, GuardVerdict.ACCEPT, "")
    assert found.shadow.startswith("distance: the plan comes to -1.9 m")
    assert (found.check, found.limit) == ("distance", 0.3)
    junk = bench.check(b"junk")
    assert (junk.payload, junk.reason) == (b"junk", "")
    assert bench.check(b"junk").shadow.startswith("finite: the plan is no nav_msgs/Path")
    none = bench.check(None)
    assert (none.payload, none.verdict, none.reason) == (None, GuardVerdict.ACCEPT, "there is no plan")
    bench.guard.forget(0)
    assert (
        bench.check(plan).shadow
        == "start is not checked: no odometry was received; distance is not checked: no odometry was"
        " received"
    )


def test_given_acting_and_shadow_checks_when_both_fail_then_only_one_acts():
    bench = Bench(act=["distance"], shadow=["speed"], boxes=[Box(30.0, 0.0)], speed=50.0)
    found = bench.check(bench.plan())
    assert found.check == "distance"
    assert found.shadow.startswith("speed: the plan 50 m/s at pose")
    off = Bench(act=["speed"], boxes=[Box(10.0, 0.0)])
    assert off.check(off.plan()).verdict is GuardVerdict.ACCEPT
    assert off.check(b"junk").verdict is GuardVerdict.REBASED
    assert off.check(plan_bytes(0 * T, T, 0.0, 0.0)).check == "stamps"
    both = Bench(boxes=[Box(30.0, 0.0)], speed=50.0)
    assert both.check(both.plan()).shadow == ""


def test_given_an_activation_when_older_things_come_then_they_do_not_count():
    bench = Bench()
    bench.check(bench.plan())
    bench.guard.forget(bench.now_ns + 1)
    bench.feel()
    found = bench.check(b"junk")
    assert (found.payload, found.verdict) == (None, GuardVerdict.UNCHECKED)
    assert "no odometry was received" in bench.check(bench.plan()).reason
    bench.guard.forget(bench.now_ns)
    assert bench.feel().check(bench.plan()).verdict is GuardVerdict.ACCEPT
    bench.guard.forget(0)
    bench.after_s = 0.1
    assert (
        bench.feel().check(b"junk").reason.endswith("in the bend that it drives")
    )  # no earlier plan either
    assert bench.check(bench.plan()).verdict is GuardVerdict.ACCEPT


@pytest.mark.parametrize(("first", "late"), [([Box(25.0, 0.0)], [FAR]), ([FAR], [Box(25.0, 0.0)])])
def test_given_messages_that_were_overtaken_when_they_come_late_then_they_take_nothing_away(first, late):
    bench = Bench(boxes=first)
    old_ns = bench.ros_ns - 150 * MS
    bench.guard.saw(0, markers_bytes(late, stamp_ns=old_ns), bench.now_ns + 10 * MS)
    bench.guard.moved(odometry_bytes(-1.0, speed=3.0, stamp_ns=old_ns), bench.now_ns + 10 * MS)
    bench.after_s = 0.02
    assert bench.check(bench.plan()).verdict is GuardVerdict.BRAKE
    assert bench.guard.refused["odometry why"] == "stamped before the message that came before it"
    # An array that comes in time replaces both.
    bench.guard.saw(0, markers_bytes([FAR], stamp_ns=bench.ros_ns), bench.now_ns)
    assert bench.check(bench.plan()).verdict is GuardVerdict.ACCEPT


def test_given_thousands_of_poses_when_checked_then_obstacles_are_found_all_the_same():
    bench = Bench(boxes=[Box(25.0, 0.0)])
    plan = straight_plan(step_s=0.001)
    assert bench.check(plan).check == "distance"
    path = TimedPath.parse(bench.check(plan).payload)
    assert len(path.stamps_ns) == 200


@pytest.mark.parametrize(("left_ns", "along"), [(0, "in the bend that it drives"), (1, "on the same path")])
def test_given_a_plan_that_is_over_when_checked_then_nothing_brakes_along_it(left_ns, along):
    found = Bench().check(plan_bytes(T - 3.0, 10 * T - 30.0, 0.0, 0.0, start_ns=START_NS + left_ns))
    assert found.check == "start"
    assert found.reason.endswith(along)


@settings(deadline=None)
@given(
    speed=st.floats(0.5, 25.0),
    braking=st.floats(0.0, 9.0),
    after_s=st.floats(0.0, 2.9),
    aside_m=st.floats(-0.45, 0.45),
)
def test_given_a_vehicle_that_was_braked_when_it_stops_along_the_last_valid_plan_then_it_does_so_from_where_it_is(
    speed, braking, after_s, aside_m
):
    bench = Bench(speed)
    assert bench.check(bench.plan()).verdict is GuardVerdict.ACCEPT
    braked_s = min(after_s, speed / braking if braking else math.inf)
    bench.after_s, bench.speed = after_s, speed - braking * braked_s
    x = speed * braked_s - 0.5 * braking * braked_s**2 + bench.speed * (after_s - braked_s)
    bench.feel(odometry=False)
    own = odometry_bytes(x, aside_m, speed=bench.speed, stamp_ns=bench.ros_ns)
    bench.guard.moved(own, bench.now_ns)
    found = bench.check(None)
    assert found.reason == "there is no plan; stops by 8 m/s^2 along the last valid plan"
    _, places, asides, *_ = motion_of(found.payload)
    assert places[0] == pytest.approx(x, abs=0.01)
    assert asides == pytest.approx(aside_m, abs=0.01)
    assert places[-1] == pytest.approx(x + bench.speed**2 / 16.0, abs=0.01)  # where it stands it stays


@pytest.mark.parametrize("x", [0.0, 3.0, 6.0, 8.5])
def test_given_a_path_that_turns_round_when_set_to_a_place_then_the_pass_that_is_nearer_in_time_counts(x):
    times_s = np.arange(0.0, 4.05, 0.1)
    out = np.where(times_s <= 2.0, 5.0 * times_s, 20.0 - 5.0 * times_s)
    path = TimedPath.parse(plan_bytes(times_s, out, 0.0, 0.0, start_ns=START_NS))
    for now_s in (0.5, 3.5):
        now_ns = START_NS + round(now_s * S)
        own = path.begun_at(complex(x, 0.0), now_ns, 1.0)
        passes_s = (x / 5.0, 4.0 - x / 5.0)
        wanted_s = min(passes_s, key=lambda one: abs(one - now_s))
        assert own.stamps_ns[0] == pytest.approx(now_ns - wanted_s * S, abs=0.03 * S)


def test_given_a_plan_that_begins_soon_when_braked_then_braking_begins_with_it():
    bench = Bench(boxes=[Box(28.0, 0.0)])
    found = bench.check(plan_bytes(T, 10 * T + 1.0, 0.0, 0.0, start_ns=START_NS + 100 * MS))
    assert found.verdict is GuardVerdict.BRAKE
    assert motion_of(found.payload)[0][0] == pytest.approx(0.1)


@settings(max_examples=60)
@given(
    length=st.integers(0, 3000),
    flips=st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 255)), max_size=6),
)
def test_given_any_bytes_as_a_plan_when_checked_then_something_drivable_is_published(length, flips):
    bench = Bench()
    data = bytearray(bench.plan()[:length])
    for at, value in flips:
        if at < len(data):
            data[at] = value
    found = bench.check(bytes(data))
    assert found.payload is not None
    path = TimedPath.read(found.payload)
    assert path is not None
    if found.verdict is GuardVerdict.ACCEPT:
        assert bytes(data) == found.payload


def replaced(step_s, after_s, plan, odometry):
    """What is published instead of a plan, `step_s` after the system clock has stepped.

    And ROS time of now.
    """
    bench = Bench(boxes=[Box(30.0, 0.0)] if plan == "too far" else [FAR])
    good = bench.plan(acceleration=-2.5)
    if plan != "too far":
        assert bench.check(good).verdict is GuardVerdict.ACCEPT
    step_ns, bench.after_s = round(step_s * S), after_s
    if plan == "too fast":
        data = plan_bytes(T, 50.0 * T, 0.0, 0.0)
    else:
        data = {"too far": straight_plan(), "none": None, "junk": b"junk"}[plan]
    guard, ros_ns = bench.guard, bench.ros_ns + step_ns
    if odometry:  # in the clock's new time
        x, speed = 10.0 * after_s - 1.25 * after_s**2, 10.0 - 2.5 * after_s
        guard.moved(odometry_bytes(x, speed=speed, stamp_ns=ros_ns), bench.now_ns)
        guard.saw(
            0,
            markers_bytes([Box(30.0, 0.0)] if plan == "too far" else [FAR], stamp_ns=ros_ns),
            bench.now_ns,
        )
    else:
        guard.forget(0)
        guard.check(good, 10 * S, START_NS, 60.0)
    found = guard.check(data, bench.now_ns, ros_ns, 60.0, step_ns)
    return found, TimedPath.parse(found.payload), ros_ns


@settings(max_examples=120)
@given(
    step_s=st.one_of(st.floats(-0.02, 0.02), st.floats(-12.0, 12.0), st.floats(-1e8, 1e8)),
    after_s=st.floats(0.0, 2.0),
    plan=st.sampled_from(["too far", "too fast", "none", "junk"]),
    odometry=st.booleans(),
)
def test_given_any_step_of_the_system_clock_when_a_plan_is_replaced_then_place_and_braking_are_the_same(
    step_s, after_s, plan, odometry
):
    odometry = odometry or plan == "too far"
    (found, path, ros_ns), (same, other, there_ns) = (
        replaced(one, after_s, plan, odometry) for one in (step_s, 0.0)
    )
    assert (found.verdict, found.check) == (same.verdict, same.check)
    assert path.points == pytest.approx(other.points, abs=1e-6)
    assert (path.stamps_ns - ros_ns).tolist() == pytest.approx(
        (other.stamps_ns - there_ns).tolist(), abs=100
    )
    assert path.stamps_ns[0] == ros_ns


@settings(max_examples=100)
@given(step_s=st.one_of(st.floats(-12.0, 12.0), st.floats(-1e8, 1e8)), later_s=st.floats(0.02, 3.0))
def test_given_any_step_of_the_system_clock_while_a_stop_goes_on_then_place_and_braking_are_the_same(
    step_s, later_s
):
    guard = Guard(guard_options({"guard.act": ["all"]}))
    guard.check(straight_plan(), 10 * S, START_NS, 60.0)
    first = guard.check(None, 10 * S + S // 2, START_NS + S // 2, 60.0)
    later_ns, step_ns = round(later_s * S), round(step_s * S)
    found = guard.check(None, 10 * S + S // 2 + later_ns, START_NS + S // 2 + later_ns + step_ns, 60.0)
    one, other = TimedPath.parse(first.payload), TimedPath.parse(found.payload)
    assert other.points == pytest.approx(one.points)
    stepped = abs(step_ns) > later_ns + 5 * MS  # else it may be a clock that runs faster or slower
    assert set(other.stamps_ns - one.stamps_ns) == {step_ns if stepped else 0}


class SilentOdometry(RuleBasedStateMachine):
    """A vehicle that follows what is published exactly, and a stage and odometry that fail as they like."""

    def __init__(self):
        super().__init__()
        self.guard = Guard(guard_options({"guard.act": ["all"]}))
        self.now_ms, self.step_ns = 10_000, 0
        self.x, self.speed, self.path, self.braking = 0.0, 10.0, None, False
        self.odometry()

    @property
    def ros_ns(self):
        return START_NS + self.now_ms * MS + self.step_ns

    @rule()
    def odometry(self):
        self.felt_ms = self.now_ms
        self.guard.moved(odometry_bytes(self.x, speed=self.speed, stamp_ns=self.ros_ns), self.now_ms * MS)
        self.guard.saw(0, markers_bytes([FAR], stamp_ns=self.ros_ns), self.now_ms * MS)

    @rule(ms=st.one_of(st.integers(1, 60), st.integers(1, 900)))
    def waits(self, ms):
        self.now_ms += ms
        at_ns = self.ros_ns
        if self.path is not None:
            stamps = (self.path.stamps_ns - at_ns) / S
            self.x, self.speed = (
                float(np.interp(0.0, stamps, self.path.points[:, 0])),
                self.path.speed_at(at_ns),
            )

    @rule(speed=st.sampled_from([5.0, 10.0, 39.0, 50.0]), kind=st.sampled_from(["plan", "none", "junk"]))
    def answers(self, speed, kind):
        plan = plan_bytes(T, self.x + speed * T, 0.0, 0.0, start_ns=self.ros_ns)
        data = {"plan": plan, "none": None, "junk": b"junk"}[kind]
        found = self.guard.check(data, self.now_ms * MS, self.ros_ns, 60.0)
        if found.payload is None:
            assert self.path is None
            return
        silent, path = self.now_ms - self.felt_ms > 200, TimedPath.parse(found.payload)
        first = path.speed_at(self.ros_ns)
        brakes = found.verdict in {GuardVerdict.BRAKE, GuardVerdict.STOP, GuardVerdict.UNAVOIDABLE}
        if brakes:
            last_s = (path.stamps_ns[-1] - path.stamps_ns[-2]) / S
            assert (
                path.points[-1, 0] - path.points[-2, 0] <= 0.5 * 8.0 * last_s**2 + 1e-6
            )  # it ends at standstill
        if self.braking and silent and found.verdict is not GuardVerdict.UNCHECKED:
            assert brakes
            assert first <= self.speed + 0.01
        self.path, self.braking, self.speed = path, brakes, first
        self.x = float(np.interp(0.0, (path.stamps_ns - self.ros_ns) / S, path.points[:, 0]))


TestSilentOdometry = SilentOdometry.TestCase
TestSilentOdometry.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


@settings(max_examples=100)
@given(
    speed=st.floats(0.11, 8.0),
    back=st.booleans(),
    plan=st.sampled_from(["on", "too fast", "stands", "none", "junk"]),
    blocked=st.booleans(),
    turned=st.floats(-3.1, 3.1),
)
def test_given_a_vehicle_that_rolls_back_when_its_plan_leads_on_then_it_is_braked_the_way_that_it_rolls(
    speed, back, plan, blocked, turned
):
    rolls, way = (-speed if back else speed), np.exp(1j * turned)
    guard = Guard(guard_options({"guard.act": ["all"]}))
    guard.moved(odometry_bytes(yaw=turned, speed=rolls), 10 * S)
    box = way * math.copysign(7.0, -rolls) if blocked else 90 + 20j
    guard.saw(0, markers_bytes([Box(box.real, box.imag, turned)]), 10 * S)
    along = (
        {"on": -2.0 * np.sign(rolls), "too fast": -50.0 * np.sign(rolls), "stands": 0.0}.get(plan, 0.0)
        * T
        * way
    )
    data = {"none": None, "junk": b"junk"}.get(plan, plan_bytes(T, along.real, along.imag, turned))
    found = guard.check(data, 10 * S, START_NS, 60.0)
    if found.verdict is GuardVerdict.ACCEPT:
        assert speed <= 8.0  # a start within the tolerance
        return
    path = TimedPath.parse(found.payload)
    moved = (path.points[:, 0] + 1j * path.points[:, 1]) * way.conjugate()
    assert moved.real[-1] == pytest.approx(rolls * speed / (2 * 8.0), abs=0.02)
    assert (np.diff(moved.real) * rolls >= -1e-6).all()
    assert path.speed_at(START_NS) <= 1.001 * speed


ARRAY = "visualization_msgs/msg/MarkerArray"


@pytest.mark.parametrize("old_s", [2.0, 10.0, 3600.0])
@pytest.mark.parametrize("old", [1, 3])
def test_given_old_markers_beside_a_fresh_one_in_the_way_when_judged_then_that_one_still_counts(old_s, old):
    guard = Guard(guard_options({"guard.act": ["all"]}))
    for number in range(4):
        passed_ns, x = number * S // 20, 0.5 * number
        now_ns, ros_ns = 10 * S + passed_ns, START_NS + passed_ns
        array = STORE.deserialize_cdr(
            markers_bytes(
                [Box(x + 12.0, 0.0), *(Box(x, 300.0 + 10.0 * each) for each in range(old))], ros_ns
            ),
            ARRAY,
        )
        for marker in array.markers:
            if number and marker.pose.position.y > 200.0:
                marker.header.stamp.sec -= round(old_s)
        guard.moved(odometry_bytes(x=x, stamp_ns=ros_ns), now_ns)
        guard.saw(0, bytes(STORE.serialize_cdr(array, ARRAY)), now_ns)
        found = guard.check(plan_bytes(T, x + 10.0 * T, 0.0, 0.0, start_ns=ros_ns), now_ns, ros_ns, 20.0)
        assert found.check == "distance", number
        assert found.verdict is not GuardVerdict.UNCHECKED
