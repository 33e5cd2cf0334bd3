"""A stage with a guard: what it publishes in place of a plan, and where the verdict is seen."""

import time

import pytest

from benchmarks.rig.messages import START_NS, Box, S, markers_bytes, odometry_bytes, straight_plan
from torchperf_ros.api.alert import Level
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.safety.guard import Guard
from torchperf_ros.settings.safety_options import guard_options
from torchperf_ros.stage.figures import StageCounters
from torchperf_ros.stage.stage_guard import GUARD_ODOMETRY, StageGuard

from .conftest import wait_until

ODOMETRY, DETECTIONS = GUARD_ODOMETRY, GUARD_ODOMETRY - 1
SPEED = 2.0  # of the paths of `adapters_under_test.Controlled`: a metre every 0.5 s
GUARD = {
    "guard.act": ["all"],
    "guard.odometry_timeout_ms": 10_000.0,
    "guard.obstacles_timeout_ms": 10_000.0,
}


def tell(stage, *, since_ns=None, obstacles=()):
    """Odometry, and standing boxes of 1 m at these places along x; gives their stamp.

    The vehicle is where a plan of that stamp begins, or has driven along the plan of an earlier one.
    """
    now_ns = time.time_ns()
    x = SPEED * (now_ns - (since_ns or now_ns)) / S
    odometry = odometry_bytes(x=x, speed=SPEED, stamp_ns=now_ns, frame="map")
    boxes = [Box(at, 0.0, length=1.0, width=1.0, velocity=None) for at in obstacles]
    stage.actor.hear(ODOMETRY, odometry, now_ns)
    stage.actor.hear(DETECTIONS, markers_bytes(boxes, stamp_ns=now_ns, frame="map"), 0)
    return now_ns


def positions(stage, answer):
    return [one.pose.position.x for one in stage.payload(answer).poses]


@pytest.fixture(scope="module")
def running(start_stage):
    return start_stage(backup="none", tiers=["full"], **GUARD)


@pytest.fixture
def stage(running):
    """The module's stage, with nothing held, and a guard that knows nothing."""
    running.wait_for_workers()
    running.actor.activate()
    running.anomalies.clear()
    return running


def test_given_a_guard_that_knows_nothing_when_a_frame_is_answered_then_it_goes_out_unchecked_and_that_is_told(
    stage,
):
    answer = stage.ask()
    assert (answer.outcome, answer.check) == (Outcome.ON_TIME, GuardVerdict.UNCHECKED)
    assert positions(stage, answer) == list(range(11))
    assert answer.reason.startswith("guard, unchecked: no odometry was received")
    wait_until(lambda: stage.anomalies, lambda: "an alert")
    assert stage.anomalies[0].name == "tested: plan unchecked"
    assert stage.health is Health.DEGRADED
    assert stage.counters.checks[GuardVerdict.UNCHECKED] >= 1


def test_given_a_free_road_when_a_frame_is_answered_then_its_bytes_go_out_as_they_are(stage):
    answer = stage.ask(stamp_ns=tell(stage))
    assert (answer.outcome, answer.check, answer.reason) == (Outcome.ON_TIME, GuardVerdict.ACCEPT, "")
    assert stage.published[-1] == answer.payload
    assert stage.anomalies == []


def test_given_a_plan_into_a_standing_car_when_answered_then_it_brakes_and_topics_and_alert_say_why(stage):
    good = stage.ask(stamp_ns=tell(stage))
    answer = stage.ask(stamp_ns=tell(stage, obstacles=[9.0]))
    assert answer.outcome is Outcome.ON_TIME
    assert answer.check in {GuardVerdict.BRAKE, GuardVerdict.REBASED, GuardVerdict.STOP}
    assert max(positions(stage, answer)) < 8.5 - 3.5
    assert answer.reason.startswith(f"guard, {answer.check.word}: distance: the plan ")
    wait_until(lambda: stage.anomalies, lambda: "an alert")
    (alert,) = stage.anomalies
    assert alert.name == "tested: plan refused"
    assert (alert.values["check"], alert.values["verdict"]) == ("distance", answer.check.word)
    assert stage.published[-1] == answer.payload == stage.handed_on[-1][0]
    assert good.check is GuardVerdict.ACCEPT


def fresh_guard(**options):
    told = []
    guard = Guard(guard_options({"guard.act": ["all"], **options}))
    parts = StageCounters(), told.append, lambda: START_NS, lambda _: None, told.append
    return StageGuard("planning", guard, *parts), told


def test_given_obstacles_without_stamps_when_the_stage_before_made_them_of_an_old_frame_then_they_are_old(
    make_frame,
):
    guard, _ = fresh_guard()
    frame = make_frame(received_ns=10 * S, stamp_ns=START_NS, age_ms=0.0)
    for old_s, verdict in (
        (0.1, GuardVerdict.ACCEPT),
        (0.4, GuardVerdict.UNCHECKED),
        (11.0, GuardVerdict.UNCHECKED),
    ):
        guard.take(ODOMETRY, odometry_bytes(), START_NS, 10 * S)
        unstamped = markers_bytes([Box(90.0, 20.0)], stamp_ns=0)
        guard.take(DETECTIONS, unstamped, START_NS - round(old_s * S), 10 * S)
        assert guard.check(straight_plan(), frame, 10 * S, START_NS).verdict is verdict, old_s


@pytest.mark.parametrize("age_s", [0.06, 0.5, 9.0, 11.0, 60.0])
def test_given_a_plan_of_an_old_frame_when_checked_then_all_of_its_age_is_in_the_response_time(
    make_frame, age_s
):
    guard, _ = fresh_guard()
    guard.take(ODOMETRY, odometry_bytes(), START_NS, 10 * S)
    guard.take(DETECTIONS, markers_bytes([Box(31.0, 0.0, velocity=(10.0, 0.0))]), START_NS, 10 * S)
    frame = make_frame(received_ns=10 * S, stamp_ns=START_NS - round(age_s * S), age_ms=1000 * age_s)
    found = guard.check(straight_plan(), frame, 10 * S, START_NS)
    assert (found.verdict is GuardVerdict.ACCEPT) == (age_s < 1.0)


@pytest.mark.parametrize(("age_s", "verdict"), [(0.05, GuardVerdict.ACCEPT), (11.0, None), (60.0, None)])
@pytest.mark.parametrize("first", [True, False])
def test_given_a_frame_and_detections_of_long_ago_when_they_agree_then_the_plan_is_not_accepted(
    make_frame, age_s, verdict, first
):
    guard, _ = fresh_guard()
    guard.take(ODOMETRY, odometry_bytes(), START_NS, 10 * S)
    if not first:
        guard.take(DETECTIONS, markers_bytes([]), START_NS, 10 * S)
        frame = make_frame(received_ns=10 * S, stamp_ns=START_NS, age_ms=0.0)
        assert guard.check(straight_plan(), frame, 10 * S, START_NS).verdict is GuardVerdict.ACCEPT
    then_ns = START_NS - round(age_s * S)
    frame = make_frame(received_ns=10 * S, stamp_ns=then_ns, age_ms=1000 * age_s)
    guard.take(DETECTIONS, markers_bytes([Box(90.0, 20.0)], stamp_ns=then_ns), then_ns, 10 * S)
    found = guard.check(straight_plan(start_ns=then_ns), frame, 10 * S, START_NS)
    assert (found.verdict is GuardVerdict.ACCEPT) == (verdict is GuardVerdict.ACCEPT)


def test_given_a_source_in_another_clock_when_a_plan_is_checked_then_that_is_an_alert_and_on_diagnostics(
    make_frame,
):
    guard, told = fresh_guard()
    frame = make_frame(received_ns=10 * S, stamp_ns=START_NS, age_ms=0.0)
    for _ in range(2):
        guard.take(ODOMETRY, odometry_bytes(stamp_ns=7 * S), 7 * S, 10 * S)
        guard.take(DETECTIONS, markers_bytes([]), START_NS, 10 * S)
        assert guard.check(straight_plan(), frame, 10 * S, START_NS).verdict is GuardVerdict.ACCEPT
    (alert,) = told
    assert (alert.level, alert.name, alert.once) == (Level.WARN, "planning: clock", True)
    assert alert.message.startswith(
        "odometry: the clock of its stamps is its own, 1.7e+09 s behind ROS time; its "
    )
    assert guard.refused == {"odometry clock": "its own, 1.7e+09 s behind ROS time"}


def test_given_a_refused_plan_when_the_next_frame_fails_then_the_accepted_one_before_it_is_held(stage):
    good = stage.ask(stamp_ns=tell(stage))
    stage.ask(stamp_ns=tell(stage, obstacles=[9.0]))
    held = stage.ask({"do": "raise"}, stamp_ns=tell(stage, since_ns=good.frame.stamp_ns))
    assert (held.outcome, held.fallback, held.check) == (
        Outcome.ERROR,
        Fallback.HOLD_LAST,
        GuardVerdict.ACCEPT,
    )
    assert held.payload == good.payload


def test_given_an_emergency_lane_that_withholds_the_output_when_answered_then_the_record_says_what_went_out(
    start_own_stage,
):
    stage = start_own_stage(backup="none", tiers=["full"])
    publish, stage.actor.ports.publish = (
        stage.actor.ports.publish,
        lambda payload: (Fallback.STOP, b"the lane's"),
    )
    answer = stage.ask()
    assert (answer.outcome, answer.fallback, answer.payload) == (
        Outcome.ON_TIME,
        Fallback.STOP,
        b"the lane's",
    )
    assert answer.reason == "withheld: the emergency lane is latched"
    stage.actor.ports.publish = lambda payload: (Fallback.NONE, None)
    answer = stage.ask()
    assert (answer.outcome, answer.fallback, answer.payload) == (Outcome.ON_TIME, Fallback.NONE, None)
    assert (stage.counters.answered, stage.counters.unanswered, stage.counters.miss_ratio(0)) == (1, 1, 0.0)
    assert stage.health is Health.NOMINAL
    stage.actor.ports.publish = publish
    held = stage.ask({"do": "raise"})
    assert (held.fallback, positions(stage, held)) == (Fallback.HOLD_LAST, list(range(11)))


def test_given_nothing_to_publish_when_the_vehicle_moves_then_the_guard_stops_it(start_own_stage):
    stage = start_own_stage(backup="none", tiers=["full"], fallback=["none"], **GUARD)
    answer = stage.ask({"do": "raise"}, stamp_ns=tell(stage))
    assert (answer.outcome, answer.fallback, answer.check) == (
        Outcome.ERROR,
        Fallback.NONE,
        GuardVerdict.STOP,
    )
    first, *_, last = positions(stage, answer)  # from where the vehicle is by then
    assert last - first < 1.0
    assert "there is no plan" in answer.reason
    assert (stage.counters.answered, stage.counters.unanswered) == (1, 0)


def test_given_an_error_in_the_guard_when_frames_are_answered_then_the_stage_s_stop_goes_out_until_it_is_over(
    stage, monkeypatch
):
    errors = stage.counters.internal_errors
    with monkeypatch.context() as patch:
        patch.setattr("torchperf_ros.safety.guard.beyond_limits", lambda *_: 1 / 0)
        nothing = stage.ask(stamp_ns=tell(stage))  # no plan was accepted yet
        assert (nothing.outcome, nothing.fallback, nothing.payload) == (Outcome.ERROR, Fallback.NONE, None)
        assert nothing.check is GuardVerdict.UNCHECKED
        assert "there is no earlier plan to stop along" in nothing.reason
        assert "an error in the guard: ZeroDivisionError: division by zero" in nothing.reason
    assert stage.ask(stamp_ns=tell(stage)).check is GuardVerdict.ACCEPT
    with monkeypatch.context() as patch:
        patch.setattr("torchperf_ros.safety.guard.beyond_limits", lambda *_: 1 / 0)
        stops = [stage.ask(), stage.ask({"do": "raise"}), stage.ask()]
    for answer in stops:
        assert (answer.outcome, answer.fallback, answer.check) == (
            Outcome.ERROR,
            Fallback.STOP,
            GuardVerdict.STOP,
        )
        assert "an error in the guard: ZeroDivisionError" in answer.reason
        assert answer.payload == stops[0].payload == stage.published[-1]
    x = positions(stage, stops[0])
    assert x[-1] - x[0] < 1.0  # 2 m/s by 3 m/s^2 stand after 0.67 m
    assert stage.counters.internal_errors == errors + 4
    assert any("had an error in its guard:\nTraceback" in text for _, text in stage.logs)
    assert stage.health is Health.DEGRADED
    assert stage.ask(stamp_ns=tell(stage)).outcome is Outcome.ON_TIME


def test_given_checks_in_shadow_when_a_plan_would_be_refused_then_it_goes_out_and_is_counted(
    start_own_stage, monkeypatch
):
    shadow = {**GUARD, "guard.act": [""], "guard.shadow": ["distance"]}
    stage = start_own_stage(backup="none", tiers=["full"], **shadow)
    answer = stage.ask(stamp_ns=tell(stage, obstacles=[9.0]))
    assert (answer.outcome, answer.check, answer.reason) == (Outcome.ON_TIME, GuardVerdict.ACCEPT, "")
    assert positions(stage, answer) == list(range(11))
    assert stage.counters.shadow_refusals == 1
    wait_until(lambda: stage.anomalies, lambda: "an alert")
    assert stage.anomalies[0].name == "tested: plan refused, in shadow"
    monkeypatch.setattr("torchperf_ros.safety.guard.Guard.check", lambda *_: 1 / 0)
    answer = stage.ask()  # what only watches must not stop the vehicle
    assert (answer.outcome, answer.check, positions(stage, answer)) == (
        Outcome.ERROR,
        GuardVerdict.ACCEPT,
        list(range(11)),
    )
