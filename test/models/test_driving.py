import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import decode
from torchperf_ros.models.driving import OracleAdapter, RulePlannerAdapter
from torchperf_ros.models.driving_messages import (
    MARKER_ARRAY,
    PATH,
    SeenObject,
    encoded,
    objects_message,
    objects_of,
    odometry_message,
    path_bytes,
    route_bytes,
    route_of,
)
from torchperf_ros.models.driving_rules import Centreline
from torchperf_ros.safety.stop_output import TimedPath

S = 1_000_000_000
CPU = torch.device("cpu")
BOXES = [[40.0, 0.5, 0.1, 8.0, -0.5, 4.5, 1.9], [120.0, -3.0, 0.0, 0.0, 0.0, 0.5, 0.5]]


def objects(stamp_ns=10 * S):
    seen = [SeenObject("car", 3, BOXES[0]), SeenObject("pedestrian", 4, BOXES[1])]
    return decode(encoded(objects_message(seen, stamp_ns), MARKER_ARRAY), MARKER_ARRAY)


def received(message, stamp_ns=10 * S):
    return Received(message, stamp_ns, 0.0)


def messages(*, odom_ns=10 * S):
    odom = received(odometry_message(0.0, 0.0, 0.0, 15.0, 0.0, odom_ns), odom_ns)
    route = decode(route_bytes(Centreline.of(300.0), 15.0, 0), PATH)
    return {"detections": received(objects()), "odom": odom, "route": received(route, 0)}


def planned(adapter, given, tier="full"):
    outputs = adapter.build(tier)(*adapter.preprocess(given))
    return adapter.postprocess(outputs, given)


def test_given_objects_when_sent_as_markers_then_boxes_and_velocities_come_back():
    assert objects_of(objects()) == pytest.approx(np.array(BOXES))


def test_given_a_box_without_an_arrow_when_read_then_it_stands_still():
    array = objects()
    array.markers = [marker for marker in array.markers if marker.type == 1]
    assert objects_of(array)[0, 3:5].tolist() == [0.0, 0.0]


def test_given_a_route_when_sent_then_lane_and_speed_come_back():
    lane, wanted = route_of(decode(route_bytes(Centreline.of(600.0, 80.0, 200.0, 150.0), 12.5, 0), PATH))
    assert len(lane.points) > 30
    assert wanted == 12.5


@pytest.mark.parametrize(("tier", "count"), [("full", 2), ("medium", 1), ("fast", 1)])
def test_given_a_tier_when_the_oracle_sees_then_it_sees_as_far_as_that(tier, count):
    adapter = OracleAdapter({}, CPU)
    given = {"scan": received(None), "objects_in_sight": received(objects()), "odom": messages()["odom"]}
    outputs = adapter.build(tier)(*adapter.preprocess(given))
    assert len(objects_of(adapter.postprocess(outputs, given))) == count


def test_given_no_truth_when_the_oracle_sees_then_the_message_says_what_is_missing():
    with pytest.raises(BadInput, match="objects_in_sight has not been received"):
        OracleAdapter({}, CPU).preprocess({"scan": received(None), "odom": messages()["odom"]})


def test_given_a_frame_when_planned_then_the_path_is_stamped_and_begins_at_the_vehicle():
    path = planned(RulePlannerAdapter({}, CPU), messages(odom_ns=10 * S + 50_000_000))
    timed = TimedPath.read(path)
    assert timed.stamps_ns[0] == 10 * S + 50_000_000  # odometry's: that is where the vehicle was then
    assert decode(path, PATH).header.stamp.sec == 10  # the frame's
    assert timed.points[0].tolist() == [0.0, 0.0, 0.0]
    assert len(timed.points) == 31


def test_given_detections_older_than_odometry_when_planned_then_objects_are_brought_forward():
    _, early, _ = RulePlannerAdapter({}, CPU).preprocess(messages())
    _, late, _ = RulePlannerAdapter({}, CPU).preprocess(messages(odom_ns=11 * S))
    assert (late - early)[0, :2].tolist() == pytest.approx([8.0, -0.5])


def test_given_a_blind_planner_when_planned_then_no_object_is_taken_into_account():
    near = messages()
    near["detections"].message.markers[0].pose.position.x = 15.0
    seeing, blind = (
        TimedPath.read(planned(RulePlannerAdapter({"blind": b}, CPU), near)) for b in (0.0, 1.0)
    )
    assert blind.points[-1, 0] == pytest.approx(45.0)
    assert seeing.points[-1, 0] < 30.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.pop("odom"), "odom has not been received"),
        (lambda m: m.pop("route"), "route has not been received"),
        (lambda m: m["route"].message.poses.clear(), "route has 0 points; it has to have 2 to"),
        (lambda m: setattr(m["odom"].message.twist.twist.linear, "x", float("nan")), "odom is not finite"),
    ],
)
def test_given_a_message_that_cannot_be_used_when_planned_then_the_refusal_says_why(change, match):
    given = messages()
    change(given)
    with pytest.raises(BadInput, match=match):
        RulePlannerAdapter({}, CPU).preprocess(given)


def test_given_an_unknown_tier_or_option_when_built_then_it_is_refused():
    with pytest.raises(ConfigError, match="tier 'huge' does not exist"):
        RulePlannerAdapter({}, CPU).build("huge")
    with pytest.raises(ConfigError, match="colour"):
        RulePlannerAdapter({"colour": 1}, CPU)


def test_given_example_inputs_when_run_then_a_path_comes_out():
    adapter = RulePlannerAdapter({}, CPU)
    assert adapter.build("fast")(*adapter.example_inputs("fast")).shape == (31, 4)
    poses = decode(path_bytes(np.zeros((2, 4)), "odom", 0, 0), PATH).poses
    assert poses[1].header.stamp.nanosec == 100_000_000
