import math

import numpy as np
import pytest
import torch

from torchperf_ros.core.errors import BadInput, ConfigError
from torchperf_ros.core.history import StampVerdict
from torchperf_ros.core.message_types import decode, encode, message_class
from torchperf_ros.models.detection_messages import Detection, ImageFrame, MarkerArrays
from torchperf_ros.models.networks import HISTORY_FRAMES, WAYPOINTS
from torchperf_ros.models.planner import FRAME_FEATURES, NEAREST, PlannerAdapter
from torchperf_ros.models.stamped import header, stamp_ns_of
from torchperf_ros.worker.adapter import Received, load_adapter

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
    vector, covariance = message_class("geometry_msgs/msg/Vector3"), np.zeros(36)
    yaw = math.radians(30)
    message = message_class(ODOMETRY)(
        header=header(STAMP_NS - 5 * MS, "odom"),
        child_frame_id="base_link",
        pose=message_class("geometry_msgs/msg/PoseWithCovariance")(
            pose=message_class("geometry_msgs/msg/Pose")(
                position=message_class("geometry_msgs/msg/Point")(x=100.0, y=50.0, z=1.0),
                orientation=message_class("geometry_msgs/msg/Quaternion")(
                    x=0.0, y=0.0, z=math.sin(yaw / 2), w=math.cos(yaw / 2)
                ),
            ),
            covariance=covariance,
        ),
        twist=message_class("geometry_msgs/msg/TwistWithCovariance")(
            twist=message_class("geometry_msgs/msg/Twist")(
                linear=vector(x=15.0, y=0.0, z=0.0), angular=vector(x=0.0, y=0.0, z=0.1)
            ),
            covariance=covariance,
        ),
    )
    for path, value in changes.items():
        *parents, field = path.split("__")
        target = message
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, field, value)
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
    return decode(bytes(encode(path, adapter.output)), adapter.output)


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


def test_given_any_weights_when_planned_then_the_path_stays_near_the_rollout_and_faces_where_it_goes():
    path = plan(planner(), frame())
    end = path.poses[-1].pose.position
    radius, turned = 15.0 / 0.1, 0.1 * 3.0
    yaw = math.radians(30)
    x = 100 + radius * (math.sin(yaw + turned) - math.sin(yaw))
    y = 50 - radius * (math.cos(yaw + turned) - math.cos(yaw))
    assert math.hypot(end.x - x, end.y - y) < 0.5 * 1.5 * 3.0**2 * math.sqrt(2) + 0.1
    for before, after in zip(path.poses[:-1], path.poses[1:], strict=True):
        there, here = after.pose.position, before.pose.position
        heading = 2 * math.atan2(after.pose.orientation.z, after.pose.orientation.w)
        moved = math.atan2(there.y - here.y, there.x - here.x)
        assert abs(math.remainder(heading - moved, 2 * math.pi)) < 0.05
        assert 1.0 < math.hypot(there.x - here.x, there.y - here.y) < 2.0


def test_given_no_odometry_when_planned_then_the_path_stays_at_the_origin_of_the_base_frame():
    path = plan(planner(base_frame="vehicle"), frame(with_odom=False))
    assert path.header.frame_id == "vehicle"
    assert all((p.pose.position.x, p.pose.position.y, p.pose.orientation.w) == (0, 0, 1) for p in path.poses)


def test_given_few_frames_when_preprocessed_then_the_mask_tells_which_rows_hold_one():
    adapter = planner()
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


def test_given_a_frame_when_preprocessed_twice_then_the_history_does_not_advance():
    adapter = planner()
    adapter.observe(frame())
    first = adapter.preprocess(frame())
    second = adapter.preprocess(frame())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(adapter.history) == 1


def test_given_inputs_of_one_frame_when_the_next_is_preprocessed_then_they_do_not_change():
    adapter = planner()
    adapter.observe(frame(0))
    kept = adapter.preprocess(frame(0))
    copies = [tensor.clone() for tensor in kept]
    adapter.observe(frame(1, detections(8)))
    adapter.preprocess(frame(1))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_given_frames_that_are_only_observed_when_planned_then_they_count_as_much_as_the_others():
    planned, late = planner(), planner()
    for index in range(12):
        plan(planned, frame(index))
        late.observe(frame(index))
    assert all(
        torch.equal(a, b) for a, b in zip(planned.preprocess(frame(11)), late.preprocess(frame(11)), strict=True)
    )


@pytest.mark.parametrize(
    ("index", "verdict", "left"),
    [
        (2, StampVerdict.REPEATED, 3),
        (1, StampVerdict.OLDER, 3),
        (40, StampVerdict.GAP, 1),
        (-40, StampVerdict.JUMPED_BACK, 1),
    ],
)
def test_given_a_history_when_time_repeats_or_jumps_then_it_keeps_or_restarts_and_counts(index, verdict, left):
    adapter = planner()
    for known in range(3):
        adapter.observe(frame(known))
    adapter.observe(frame(index))
    assert len(adapter.history) == left
    assert adapter.history.rule.counts[verdict] == 1


def test_given_many_frames_when_observed_then_the_history_holds_its_bytes():
    adapter = planner()
    nbytes = adapter.history.nbytes
    for index in range(100):
        adapter.observe(frame(index, detections(index % 15)))
    assert (len(adapter.history), adapter.history.nbytes) == (HISTORY_FRAMES, nbytes)


def test_given_no_stamp_with_the_frame_when_planned_then_the_markers_have_it():
    messages = {"detections": Received(detections(), 0, math.nan)}
    assert stamp_ns_of(plan(planner(), messages).header) == STAMP_NS


def test_given_no_stamp_at_all_when_planned_then_frames_are_taken_as_they_come():
    adapter = planner()
    messages = {"detections": Received(message_class(MARKERS)(markers=[]), 0, math.nan)}
    plan(adapter, messages)
    path = plan(adapter, messages)
    assert adapter.history.rule.counts[StampVerdict.UNSTAMPED] == 2
    assert stamp_ns_of(path.poses[-1].header) == 3_000 * MS


def test_given_optical_or_body_axes_when_observed_then_the_nearest_come_first_in_vehicle_axes():
    array = detections(NEAREST + 4)
    adapter = planner()
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


def test_given_markers_that_are_no_objects_when_observed_then_they_are_skipped():
    array = detections(3)
    array.markers[1].action = 2  # DELETE
    array.markers[2].type = 9  # TEXT_VIEW_FACING
    adapter = planner()
    adapter.observe(frame(markers=array))
    strengths = adapter.preprocess(frame())[0][0, -1, :-2].view(NEAREST, 6)[:, 5]
    assert strengths.count_nonzero() == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field",
    ["pose.pose.position.x", "pose.pose.orientation.w", "twist.twist.linear.x", "twist.twist.angular.z"],
)
@pytest.mark.parametrize("method", ["observe", "preprocess"])
def test_given_odometry_that_is_not_finite_when_used_then_the_field_is_named_and_the_history_as_before(
    method, field, value
):
    adapter = planner()
    with pytest.raises(BadInput, match=rf"odom\.{field} is {value}"):
        getattr(adapter, method)(frame(odom=odometry(**{field.replace(".", "__"): value})))
    assert len(adapter.history) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"twist__twist__linear__x": 1e30}, r"odom.twist.twist.linear.x is 1e\+30; allowed: -100 to 100"),
        ({"twist__twist__angular__z": -11.0}, "odom.twist.twist.angular.z is -11.0; allowed: -10 to 10"),
        ({"pose__pose__orientation__z": 0.0, "pose__pose__orientation__w": 0.0}, "orientation is all zeros"),
    ],
)
def test_given_impossible_odometry_when_used_then_the_error_says_what(changes, says):
    with pytest.raises(BadInput, match=says):
        planner().preprocess(frame(odom=odometry(**changes)))


@pytest.mark.parametrize(("lag_ms", "way"), [(501, "older"), (-501, "newer")])
def test_given_odometry_of_another_time_when_used_then_the_error_says_how_far(lag_ms, way):
    messages = frame()
    messages["odom"] = Received(odometry(), STAMP_NS - lag_ms * MS, 1.0)
    with pytest.raises(BadInput, match=f"odom is 501 ms {way} than the detections; max_odom_lag_ms is 500"):
        planner().preprocess(messages)
    planner(max_odom_lag_ms=1000).preprocess(messages)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_given_a_marker_that_is_not_finite_when_observed_then_it_is_named_and_the_history_as_before(value):
    array = detections(3)
    array.markers[2].pose.position.x = value
    adapter = planner()
    with pytest.raises(BadInput, match=r"detections.markers\[2\] is not finite"):
        adapter.observe(frame(markers=array))
    assert len(adapter.history) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"horizon": 1}, "'horizon' .value 1. is unknown; allowed: base_frame, detections_frame, max_gap_ms"),
        ({"base_frame": ""}, "'base_frame' is ''; allowed: a non-empty string"),
        ({"detections_frame": "map"}, "'detections_frame' is 'map'; allowed: 'optical' or 'body'"),
        ({"max_gap_ms": 0}, "'max_gap_ms' is 0; allowed: a whole number from 1 to 60000"),
        ({"max_odom_lag_ms": None}, "'max_odom_lag_ms' is None"),
    ],
)
def test_given_a_bad_option_when_constructed_then_the_error_names_it_its_value_and_what_is_allowed(options, says):
    with pytest.raises(ConfigError, match=says):
        PlannerAdapter(options, CPU)


@pytest.mark.parametrize("method", ["build", "example_inputs"])
def test_given_an_unknown_tier_when_built_then_the_error_names_it_and_those_that_exist(method):
    with pytest.raises(ConfigError, match="'huge' does not exist; allowed: full, medium, fast"):
        getattr(planner(), method)("huge")


def test_given_the_path_of_the_default_configuration_when_loaded_then_it_is_this_adapter():
    assert load_adapter("torchperf_ros.models.planner:PlannerAdapter") is PlannerAdapter
    assert list(planner().inputs) == ["detections", "odom"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_a_gpu_when_planned_there_then_the_path_agrees_with_the_cpu():
    here, there = planner(), PlannerAdapter({}, torch.device("cuda"))
    for index in range(4):
        path, other = plan(here, frame(index)), plan(there, frame(index))
    end, other_end = path.poses[-1].pose.position, other.poses[-1].pose.position
    assert math.hypot(end.x - other_end.x, end.y - other_end.y) < 0.05
