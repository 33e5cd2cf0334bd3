import functools
import math

import pytest
import torch

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import decode, empty_message, encode, header, stamp_ns_of
from torchperf_ros.models.detection_messages import Detection, ImageFrame, MarkerArrays
from torchperf_ros.models.networks import (
    FRAME_FEATURES,
    HISTORY_FRAMES,
    NEAREST,
    PLANNER_WEIGHTS,
    WAYPOINTS,
)
from torchperf_ros.models.planner import PlannerAdapter

CPU = torch.device("cpu")
MS = 1_000_000
STAMP_NS = 1_700_000_000_123_456_789
FRAME_MS = 33
MARKERS = "visualization_msgs/msg/MarkerArray"
ODOMETRY = "nav_msgs/msg/Odometry"


def detections(count: int = 3, stamp_ns: int = STAMP_NS):
    """As the camera stage publishes them: the first marker clears, then cars side by side."""
    cars = [Detection(0, 0.9, 400.0 + 60 * index, 400.0, 80.0, 40.0 + index) for index in range(count)]
    array = MarkerArrays(70.0).build(cars, ImageFrame(stamp_ns, "camera", 1280, 720))
    return decode(bytes(encode(array, MARKERS)), MARKERS)


def odometry(**changes):
    """At (100, 50, 1) heading 30 degrees left, 15 m/s, 0.1 rad/s; changes by path, `.` written as `__`."""
    yaw = math.radians(30)
    message = empty_message(ODOMETRY, header=header(STAMP_NS - 5 * MS, "odom"), child_frame_id="base_link")
    at, turn, twist = message.pose.pose.position, message.pose.pose.orientation, message.twist.twist
    at.x, at.y, at.z = 100.0, 50.0, 1.0
    turn.z, turn.w = math.sin(yaw / 2), math.cos(yaw / 2)
    twist.linear.x, twist.angular.z = 15.0, 0.1
    for path, value in changes.items():
        *parents, field = path.split("__")
        setattr(functools.reduce(getattr, parents, message), field, value)
    return decode(bytes(encode(message, ODOMETRY)), ODOMETRY)


def frame(index: int = 0, markers=None, odom=None, with_odom: bool = True) -> dict[str, Received]:
    stamp_ns = STAMP_NS + index * FRAME_MS * MS
    messages = {"detections": Received(markers or detections(stamp_ns=stamp_ns), stamp_ns, 1.0)}
    if with_odom:
        messages["odom"] = Received(odom or odometry(), stamp_ns - 5 * MS, 1.0)
    return messages


def planner(**options) -> PlannerAdapter:
    return PlannerAdapter(options, CPU)


def plan(adapter: PlannerAdapter, messages: dict[str, Received], tier: str = "fast"):
    adapter.observe(messages)
    with torch.inference_mode():
        path = adapter.postprocess(adapter.build(tier)(*adapter.preprocess(messages)), messages)
    return decode(path, adapter.output)


def test_given_every_tier_when_a_frame_runs_then_a_stamped_path_starts_at_the_odometry():
    for tier in PlannerAdapter.tiers:
        path = plan(planner(), frame(), tier)
        assert (path.header.frame_id, stamp_ns_of(path.header)) == ("odom", STAMP_NS)
        start = path.poses[0].pose
        assert (start.position.x, start.position.y, start.position.z) == (100.0, 50.0, 1.0)
        assert math.isclose(2 * math.atan2(start.orientation.z, start.orientation.w), math.radians(30))
        stamps_ns = [stamp_ns_of(pose.header) for pose in path.poses]
        assert stamps_ns == [STAMP_NS + index * 100 * MS for index in range(WAYPOINTS + 1)]
        assert {pose.header.frame_id for pose in path.poses} == {"odom"}


@pytest.mark.parametrize("tier", PlannerAdapter.tiers)
def test_given_a_car_that_comes_into_view_ahead_when_planned_then_it_brakes_and_without_one_it_goes_on(
    tier,
):
    def end_speed(seen_from_m: float | None) -> float:
        adapter, speed, period_s = planner(), 15.0, 0.05
        for index in range(HISTORY_FRAMES):
            stamp_ns = STAMP_NS + round(index * period_s * 1e9)
            ahead_m = None if seen_from_m is None else seen_from_m - index * period_s * speed
            cars = (
                []
                if ahead_m is None
                else [Detection(0, 0.9, 640.0, 370.0, 1737.0 / ahead_m, 1371.0 / ahead_m)]
            )
            array = MarkerArrays(70.0).build(cars, ImageFrame(stamp_ns, "camera", 1280, 720))
            ahead = odometry(twist__twist__angular__z=0.0)
            messages = {
                "detections": Received(array, stamp_ns, 1.0),
                "odom": Received(ahead, stamp_ns, 1.0),
            }
            adapter.observe(messages)
        with torch.inference_mode():
            outputs = adapter.build(tier)(*adapter.preprocess(messages))
        return outputs[0, -1, 3].item()

    assert end_speed(None) > 14.0
    assert end_speed(66.75) < end_speed(None) - 2.0  # 60 m at last
    assert end_speed(25.0) < 7.0


def test_given_the_weights_that_ship_when_their_file_is_looked_at_then_it_is_small():
    assert PLANNER_WEIGHTS.stat().st_size < 4_000_000


def test_given_no_odometry_when_planned_then_the_path_stays_at_the_origin_of_the_base_frame():
    path = plan(planner(base_frame="vehicle"), frame(with_odom=False))
    assert path.header.frame_id == "vehicle"
    assert all(
        (p.pose.position.x, p.pose.position.y, p.pose.orientation.w) == (0, 0, 1) for p in path.poses
    )


def test_given_an_anytime_planner_when_it_runs_then_every_step_is_a_path_and_the_last_is_that_of_any_other_planner():
    adapter, other = planner(anytime=True), planner()
    assert (adapter.anytime, other.anytime) == (True, False)
    whole = plan(other, frame())
    adapter.observe(frame())
    steps = adapter.steps(adapter.build("fast"), adapter.preprocess(frame()))
    with torch.inference_mode():
        paths = [adapter.postprocess(outputs, frame()) for outputs in steps]
    assert len(set(paths)) == len(paths) == 3
    assert paths[-1] == bytes(encode(whole, adapter.output))


@pytest.fixture
def adapter():
    return planner()


def test_given_few_frames_when_preprocessed_then_the_mask_tells_which_rows_hold_one(adapter):
    history, mask, ego = adapter.preprocess(frame())
    assert not mask.any()
    adapter.observe(frame(0))
    adapter.observe(frame(1))
    history, mask, ego = adapter.preprocess(frame(1))
    assert history.shape == (1, HISTORY_FRAMES, FRAME_FEATURES)
    assert mask.tolist() == [[False] * (HISTORY_FRAMES - 2) + [True] * 2]
    assert torch.equal(history[0, -1, -2:], torch.tensor([1.5, 0.1]))
    assert ego.tolist() == [[15.0, pytest.approx(0.1)]]
    assert [(t.shape, t.dtype) for t in adapter.example_inputs("full")] == [
        (t.shape, t.dtype) for t in (history, mask, ego)
    ]


def test_given_inputs_of_one_frame_when_the_next_is_preprocessed_then_they_do_not_change(adapter):
    adapter.observe(frame(0))
    kept = adapter.preprocess(frame(0))
    copies = [tensor.clone() for tensor in kept]
    adapter.observe(frame(1, detections(8)))
    adapter.preprocess(frame(1))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_given_no_stamp_with_the_frame_when_planned_then_the_markers_have_it():
    messages = {"detections": Received(detections(), 0, math.nan)}
    assert stamp_ns_of(plan(planner(), messages).header) == STAMP_NS


def test_given_optical_or_body_axes_when_observed_then_the_nearest_come_first_in_vehicle_axes(adapter):
    array = detections(NEAREST + 4)
    adapter.observe(frame(markers=array))
    features = adapter.preprocess(frame())[0][0, -1, :-2].view(NEAREST, 6)
    forward, left = features[:, 0] * 50, features[:, 1] * 20
    assert (torch.hypot(forward, left).diff() >= 0).all()
    cubes = [marker for marker in array.markers if marker.action == 0]
    nearest = min(cubes, key=lambda marker: math.hypot(marker.pose.position.z, marker.pose.position.x))
    assert forward[0].item() == pytest.approx(nearest.pose.position.z, rel=1e-5)
    assert left[0].item() == pytest.approx(-nearest.pose.position.x, rel=1e-5)
    body = planner(detections_frame="body")
    for marker in cubes:
        at, size = marker.pose.position, marker.scale
        at.x, at.y, at.z = at.z, -at.x, -at.y
        size.x, size.y, size.z = size.z, size.x, size.y
    body.observe(frame(markers=array))
    assert torch.equal(body.preprocess(frame())[0], adapter.preprocess(frame())[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pose__pose__orientation__w": math.nan}, r"odom\.pose\.pose\.orientation\.w is nan"),
        ({"twist__twist__linear__x": math.inf}, r"odom\.twist\.twist\.linear\.x is inf"),
        (
            {"twist__twist__linear__x": 1e30},
            r"odom\.twist\.twist\.linear\.x is 1e\+30; allowed: -100 to 100",
        ),
        (
            {"pose__pose__orientation__z": 0.0, "pose__pose__orientation__w": 0.0},
            "orientation is all zeros",
        ),
    ],
)
def test_given_impossible_odometry_when_used_then_the_error_says_what_and_the_history_is_as_before(
    changes, says
):
    adapter, messages = planner(), frame(odom=odometry(**changes))
    for use in (adapter.observe, adapter.preprocess):
        with pytest.raises(BadInput, match=says):
            use(messages)
    assert len(adapter.history) == 0


@pytest.mark.parametrize(("index", "left"), [(1, 3), (40, 1)])
def test_given_a_history_when_time_goes_back_or_jumps_then_it_keeps_or_restarts(adapter, index, left):
    for known in (0, 1, 2, index):
        adapter.observe(frame(known))
    assert len(adapter.history) == left


@pytest.mark.parametrize(("lag_ms", "way"), [(501, "older"), (-501, "newer")])
def test_given_odometry_of_another_time_when_used_then_the_error_says_how_far(lag_ms, way):
    messages = frame()
    messages["odom"] = Received(odometry(), STAMP_NS - lag_ms * MS, 1.0)
    with pytest.raises(BadInput, match=f"odom is 501 ms {way} than the detections; max_odom_lag_ms is 500"):
        planner().preprocess(messages)
    planner(max_odom_lag_ms=1000).preprocess(messages)


def test_given_a_marker_that_is_not_finite_when_observed_then_it_is_named_and_the_history_as_before(
    adapter,
):
    array = detections(3)
    array.markers[2].pose.position.x = math.nan
    with pytest.raises(BadInput, match=r"detections.markers\[2\] is not finite"):
        adapter.observe(frame(markers=array))
    assert len(adapter.history) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_a_gpu_when_planned_there_then_the_path_agrees_with_the_cpu():
    here, there = planner(), PlannerAdapter({}, torch.device("cuda"))
    for index in range(4):
        path, other = plan(here, frame(index)), plan(there, frame(index))
    end, other_end = path.poses[-1].pose.position, other.poses[-1].pose.position
    assert math.hypot(end.x - other_end.x, end.y - other_end.y) < 0.05
