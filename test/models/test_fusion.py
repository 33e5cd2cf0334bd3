"""What camera and lidar see together, and each alone."""

import math

import pytest
import torch

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.camera_driving import CameraDrivingAdapter
from torchperf_ros.models.detection_messages import Cube, Detection
from torchperf_ros.models.fusion import FusionAdapter, fused
from torchperf_ros.models.lidar import LidarAdapter
from torchperf_ros.models.networks import BOX_FIELDS, CLASSES

CPU = torch.device("cpu")
CAR, PEDESTRIAN = CLASSES.index("car"), CLASSES.index("pedestrian")
# The modules filter this warning themselves, but pytest resets filters.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def cube(x, y, score=0.6, kind=CAR, length=4.5, width=1.9):
    return Cube(kind, score, (x, y, 0.75), (length, width, 1.5), 0.3)


def seen(ahead, left, score=0.6, kind=CAR, width=1.9):
    return Detection(kind, score, 0.0, 0.0, 1.0, 1.0), (ahead, left, width)


def test_given_an_object_that_both_see_when_fused_then_it_stands_where_the_lidar_has_it_and_is_surer():
    (found,) = fused([seen(21.0, 2.2, 0.5)], [cube(20.0, 2.0, 0.6)])
    assert found == cube(20.0, 2.0)._replace(score=pytest.approx(0.72))
    (found,) = fused(
        [seen(21.0, 2.2, 0.5, PEDESTRIAN)], [cube(20.0, 2.0, 0.6)]
    )  # of another class: less sure
    assert found == cube(20.0, 2.0)._replace(score=pytest.approx(0.42))


def test_given_one_of_its_class_beside_another_when_fused_then_it_goes_to_that_one():
    near, own = cube(20.0, 0.0), cube(20.0, 0.9, kind=PEDESTRIAN)
    found = fused([seen(19.0, 0.1, 0.5, PEDESTRIAN)], [near, own])
    assert found == [near, own._replace(score=pytest.approx(0.72))]


@pytest.mark.parametrize("other", [seen(20.0, -4.0), seen(60.0, 6.0), seen(6.0, 0.6)])
def test_given_two_objects_in_other_directions_or_at_other_distances_when_fused_then_both_are_there(other):
    found = fused([other], [cube(20.0, 2.0)])
    assert [one.score for one in found] == [0.6, 0.3], "what the lidar has not seen is doubted"
    assert found[0] == cube(20.0, 2.0)
    assert found[1].centre[:2] == (other[1][0] + 2.25, other[1][1])


def test_given_two_boxes_in_one_direction_when_fused_then_each_goes_to_one():
    found = fused(
        [seen(18.0, 0.0, 0.9), seen(18.5, 0.1, 0.8)], [cube(20.0, 0.0, 0.5), cube(22.0, 0.2, 0.5)]
    )
    assert sorted(one.score for one in found) == [pytest.approx(0.74), pytest.approx(0.77)]


def messages(*names):
    given = {**CameraAdapter({}, CPU).example_messages(), **LidarAdapter({}, CPU).example_messages()}
    return {name: Received(given[name].message, 5, 0.0) for name in ("odom", *names)}


def outputs(camera_score, lidar_score):
    """A car straight ahead for each of them, as their networks would say it."""
    cells = torch.zeros(1, 3, BOX_FIELDS + len(CLASSES))
    cells[0, 0, :6] = torch.tensor([camera_score, 0.5, 0.6, 0.1, 0.2, 9.0])
    boxes = torch.zeros(1, 3, 7 + len(CLASSES))
    boxes[0, 0, :8] = torch.tensor([lidar_score, 12.0, 0.0, 4.5, 1.9, 0.0, 1.0, 9.0])
    return cells, boxes


@pytest.mark.parametrize(
    ("given", "scores"),
    [(("image", "cloud"), [0.7 + 0.3 * 0.6 * 0.9]), (("image",), [0.9]), (("cloud",), [0.7])],
)
def test_given_one_sensor_or_both_when_postprocessed_then_what_is_there_is_published_and_the_lost_one_says_nothing(
    given, scores
):
    adapter = FusionAdapter({"camera": {"camera_height_m": 1.4}}, CPU)
    image, points = adapter.preprocess(messages(*given))
    assert (bool(image.any()), len(points) > 2) == ("image" in given, "cloud" in given)
    found = adapter.postprocess(outputs(0.9, 0.7), messages(*given)).markers[1:]
    assert [one.color.a for one in found] == pytest.approx(scores)
    assert {(one.header.stamp.nanosec, one.header.frame_id) for one in found} == {(5, "base_link")}
    assert found[0].ns == "car"


def test_given_neither_sensor_then_the_error_says_so():
    adapter = FusionAdapter({}, CPU)
    with pytest.raises(BadInput, match="neither image nor cloud is there"):
        adapter.preprocess(messages())


@pytest.mark.parametrize(
    ("adapter", "options", "says"),
    [
        *(
            (CameraAdapter, options, says)
            for options, says in (
                ({"colour": 1}, "'colour' .value 1. is unknown; allowed: compressed, output"),
                ({"compressed": 1}, "'compressed' is 1; allowed: true or false"),
                ({"output": []}, "'output' is \\[\\]; allowed: 'markers' or 'detection2d'"),
                (
                    {"max_detections": True},
                    "'max_detections' is True; allowed: a whole number from 0 to 1792",
                ),
                ({"score_threshold": math.nan}, "'score_threshold' is nan; allowed: a number from 0 to 1"),
            )
        ),
        *(
            (LidarAdapter, options, says)
            for options, says in (
                (
                    {"colour": 1},
                    "'colour' .value 1. is unknown; allowed: max_detections, score_threshold, height_m",
                ),
                ({"height_m": 11}, "'height_m' is 11; allowed: a number from -10 to 10"),
                ({"weights": 3}, "'weights' is 3; allowed: a non-empty string"),
            )
        ),
        *(
            (FusionAdapter, options, says)
            for options, says in (
                ({"camera": 3}, "'camera' is 3; it has to be an object"),
                ({"camera": {"horizon": math.inf}}, "'horizon' is inf"),
                ({"lidar": {"hight": 1}}, "'hight' .value 1. is unknown"),
                ({"hight": 1}, "FusionAdapter: option 'hight'"),
                ({"lidar": {"score_threshold": 0.4}}, "'score_threshold' of 'lidar' has no effect"),
            )
        ),
        (CameraDrivingAdapter, {"horizon": 2.0}, "'horizon' is 2.0; allowed: a number from 0 to 1"),
        (CameraDrivingAdapter, {"hight": 1}, "'hight' .value 1. is unknown"),
    ],
)
def test_given_a_bad_option_when_constructed_then_the_error_names_it_its_value_and_what_is_allowed(
    adapter, options, says
):
    with pytest.raises(ConfigError, match=says):
        adapter(options, CPU)


def test_given_the_example_when_run_then_both_networks_answer():
    adapter = FusionAdapter({}, CPU)
    model = adapter.build("fast")
    with torch.inference_mode():
        found = model(*adapter.example_inputs("fast"))
    assert [one.shape[0] for one in found] == [1, 1]
    assert adapter.dynamic_dims() == {1: LidarAdapter({}, CPU).dynamic_dims()[0]}
    assert list(adapter.inputs) == ["odom", "image", "cloud"]
