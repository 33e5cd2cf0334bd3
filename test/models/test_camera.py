import math
import sys

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api import messages as message_types
from torchperf_ros.api.adapter import Received
from torchperf_ros.api.errors import ConfigError, UnknownMessageType
from torchperf_ros.api.messages import decode, empty_message, encode, header, stamp_ns_of
from torchperf_ros.models import networks
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.detection_messages import KINDS
from torchperf_ros.models.networks import CLASSES, GRID_CELLS, IMAGE_HEIGHT, IMAGE_WIDTH
from torchperf_ros.models.road_scene import RoadScene

from ..api.test_pixels import compressed as compressed_message
from ..api.test_pixels import file_of, picture
from ..api.test_pixels import image as image_message

# The module filters this warning itself, but pytest resets filters.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

CPU = torch.device("cpu")
STAMP_NS = 1_700_000_000_123_456_789
IMAGE = "sensor_msgs/msg/Image"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
VISION_MSGS = {
    "Detection2DArray": "std_msgs/Header header\nDetection2D[] detections\n",
    "Detection2D": (
        "std_msgs/Header header\nObjectHypothesisWithPose[] results\nBoundingBox2D bbox\nstring id\n"
    ),
    "ObjectHypothesisWithPose": "ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose\n",
    "ObjectHypothesis": "string class_id\nfloat64 score\n",
    "BoundingBox2D": "vision_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y\n",
    "Pose2D": "vision_msgs/Point2D position\nfloat64 theta\n",
    "Point2D": "float64 x\nfloat64 y\n",
}


def image(pixels: np.ndarray, encoding: str = "rgb8", padding: int = 0):
    """A decoded image whose data is a read-only view, as from a subscription; padding bytes are noise."""
    message = image_message(encoding, pixels, padding, header=header(STAMP_NS, "camera_optical_frame"))
    return decode(bytes(encode(message, IMAGE)), IMAGE)


def compressed(data: bytes):
    message = compressed_message(data, header=header(STAMP_NS, "camera"))
    return decode(bytes(encode(message, COMPRESSED)), COMPRESSED)


def received(message) -> dict[str, Received]:
    return {"image": Received(message, STAMP_NS, 1.0)}


def seen(message, **options) -> torch.Tensor:
    (tensor,) = CameraAdapter(options, CPU).preprocess(received(message))
    return tensor


def cells(*boxes: tuple[float, ...]) -> torch.Tensor:
    """Network outputs with the given (score, x, y, width, height, class index) and nothing else."""
    made = torch.zeros(1, GRID_CELLS, 5 + len(CLASSES))
    for index, (*box, kind) in enumerate(boxes):
        made[0, index, :5] = torch.tensor(box)
        made[0, index, 5 + int(kind)] = 1.0
    return made


@pytest.fixture
def vision_msgs(tmp_path, monkeypatch):
    """vision_msgs as installed by a ROS distribution, in a type store of its own."""
    folder = tmp_path / "share" / "vision_msgs" / "msg"
    folder.mkdir(parents=True)
    for name, text in VISION_MSGS.items():
        (folder / f"{name}.msg").write_text(text, encoding="utf-8")
    store = get_typestore(Stores.ROS2_JAZZY)
    monkeypatch.setattr(message_types, "_store", lambda: store)
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path))


@settings(max_examples=15, deadline=None)
@given(
    height=st.integers(1, 700),
    width=st.integers(1, 1000),
    encoding=st.sampled_from(["rgb8", "bgr8", "8UC3", "rgba8", "bgra8", "mono8"]),
    padding=st.integers(0, 40),
)
def test_given_any_size_when_preprocessed_then_the_tensor_is_the_networks_input(
    height, width, encoding, padding
):
    channels = {"mono8": 1, "rgba8": 4, "bgra8": 4}.get(encoding, 3)
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, channels), dtype=np.uint8)
    tensor = seen(image(pixels, encoding, padding))
    (example,) = CameraAdapter({}, CPU).example_inputs("fast")
    assert (tensor.shape, tensor.dtype, tensor.stride()) == (example.shape, example.dtype, example.stride())
    assert -1 <= tensor.min() <= tensor.max() <= 1


# Between the filter in floats and in bytes lie two roundings of half a level each, and weights of 14 bits.
LEVEL = 2 / 255
MOST_OFF = 1.05 * LEVEL


def assert_same_picture(found: torch.Tensor, expected: torch.Tensor) -> None:
    """By one grey level at the most, a third of one as a rule, and neither brighter nor shifted."""
    off = (found - expected).double()
    assert off.abs().max() <= MOST_OFF
    assert off.square().mean().sqrt() <= 0.45 * LEVEL
    assert off.mean().abs() <= 0.1 * LEVEL


def in_floats(pixels: np.ndarray) -> torch.Tensor:
    """What the network is to see of an RGB image of fewer than 1024 rows, by torch's filter for floats."""
    planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1), np.float32))
    size = (IMAGE_HEIGHT, IMAGE_WIDTH)
    small = torch.nn.functional.interpolate(planes[None], size, mode="bilinear", antialias=True)
    return small * LEVEL - 1.0


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 511), st.integers(1, 1000), st.integers(0, 9))
def test_given_any_image_when_shrunk_as_bytes_then_it_is_the_picture_that_a_gpu_makes_in_floats(
    height, width, seed
):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found, expected = seen(image(pixels)), in_floats(pixels)
    assert (found - expected).abs().max() <= MOST_OFF


def test_given_the_drawn_road_when_shrunk_as_bytes_and_in_floats_then_the_same_objects_are_found():
    pixels, adapter = RoadScene().draw(3.0), CameraAdapter({}, CPU)
    pictures = seen(image(pixels)), in_floats(pixels)
    assert_same_picture(*pictures)
    with torch.inference_mode():
        in_bytes, floats = map(adapter.build("full"), pictures)
    assert (floats[0, :, 0] > 0.5).any()
    assert adapter.score(in_bytes, floats) == 1.0


CAR, TRUCK = (0.9, 0.3, 0.5, 0.1, 0.2, 0), (0.8, 0.7, 0.5, 0.2, 0.3, 1)


@pytest.mark.parametrize(
    ("found", "score"),
    [
        ((CAR, TRUCK), 1.0),
        ((TRUCK, CAR), 1.0),
        ((CAR, TRUCK, (0.4, 0.1, 0.1, 0.1, 0.1, 0)), 1.0),  # which is not published
        (((0.6, 0.31, 0.5, 0.1, 0.2, 0), TRUCK), 1.0),
        (((0.9, 0.37, 0.5, 0.1, 0.2, 0), TRUCK), 0.5),  # overlaps by 0.3 / 1.7
        (((0.9, 0.3, 0.5, 0.1, 0.2, 3), TRUCK), 0.5),
        ((CAR, CAR, TRUCK), 0.8),
        ((CAR,), 2 / 3),
        ((), 0.0),
    ],
)
def test_given_boxes_when_scored_then_it_is_their_f1_by_hand_and_that_of_their_messages(
    found, score, vision_msgs
):
    adapter, seen = CameraAdapter({}, CPU), received(image(np.zeros((480, 640, 3), np.uint8)))
    outputs = cells(*found), cells(CAR, TRUCK)
    assert adapter.score(*outputs) == adapter.score(*reversed(outputs)) == pytest.approx(score)
    for published in ("markers", "detection2d"):
        adapter = CameraAdapter({"output": published}, CPU)
        messages = [adapter.postprocess(each, seen) for each in outputs]
        messages = [decode(bytes(encode(each, adapter.output)), adapter.output) for each in messages]
        assert adapter.score_messages(*messages) == pytest.approx(score)


def test_given_messages_with_odd_boxes_when_scored_then_those_that_mean_nothing_agree_with_none(
    vision_msgs,
):
    seen = received(image(np.zeros((480, 640, 3), np.uint8)))
    adapter = CameraAdapter({"output": "detection2d"}, CPU)
    one, other = (adapter.postprocess(cells(CAR, TRUCK), seen) for _ in range(2))
    nothing = empty_message(adapter.output)
    assert adapter.score_messages(nothing, nothing) == adapter.score(cells(), cells()) == 1.0
    one.detections[1].results = []
    assert adapter.score_messages(one, other) == 0.5
    one.detections[1].results = [other.detections[1].results[0]]
    one.detections[1].results[0].hypothesis.class_id = "bus"  # in both, which share it
    assert adapter.score_messages(one, other) == 1.0
    adapter = CameraAdapter({}, CPU)
    wanted = adapter.postprocess(cells(CAR, TRUCK), seen)
    for z in (0.0, -3.0, math.nan):
        found = adapter.postprocess(cells(CAR, TRUCK), seen)
        found.markers[1].pose.position.z = z
        assert adapter.score_messages(found, wanted) == adapter.score_messages(wanted, found) == 0.5


def test_given_the_scenes_that_ship_when_run_then_eager_finds_objects_in_each_and_other_weights_have_none(
    tmp_path,
):
    adapter = CameraAdapter({}, CPU)
    inputs = adapter.score_inputs("full")
    (example,) = adapter.example_inputs("full")
    assert len(inputs) == 8
    assert torch.equal(example, inputs[0][0])
    model = adapter.build("full")
    with torch.inference_mode():
        assert all((model(*one)[0, :, 0] > 0.5).any() for one in inputs)
    copy = tmp_path / "own.safetensors"
    copy.write_bytes(networks.DETECTOR_WEIGHTS.read_bytes())
    own = CameraAdapter({"weights": str(copy)}, CPU)
    assert own.score_inputs("full") == []  # drawn scenes say nothing of a network for photographs
    assert torch.equal(own.example_inputs("full")[0], example)
    PIL.Image.new("RGB", (100, 256)).save(tmp_path / "own_examples.png")
    with pytest.raises(ConfigError, match="100x256 pixels"):
        own.example_inputs("full")


def test_given_a_view_on_read_only_memory_when_preprocessed_then_pixels_arrive_as_they_are_and_stay_as_they_were():
    message = image(picture(IMAGE_HEIGHT, IMAGE_WIDTH))
    assert not message.data.flags.writeable
    before = message.data.copy()
    tensor = seen(message)
    assert np.array_equal(message.data, before)
    expected = torch.from_numpy(picture(IMAGE_HEIGHT, IMAGE_WIDTH)).permute(2, 0, 1) * (2 / 255) - 1
    torch.testing.assert_close(tensor[0], expected)


@pytest.mark.parametrize(("kind", "tolerance"), [("PNG", 0.0), ("JPEG", 0.4)])
def test_given_a_compressed_image_when_preprocessed_then_it_looks_like_the_raw_one(kind, tolerance):
    smooth = np.ascontiguousarray(picture(120, 200)[:, :, [0, 1, 0]])
    tensor = seen(compressed(file_of(smooth, kind)), compressed=True)
    torch.testing.assert_close(tensor, seen(image(smooth)), rtol=0, atol=tolerance)


def test_given_every_tier_when_the_drawn_road_is_seen_then_markers_of_its_cars_come_out_and_survive_the_wire():
    adapter = CameraAdapter({}, CPU)
    messages = received(image(RoadScene().draw(3.0)))
    inputs = adapter.preprocess(messages)
    for tier in adapter.tiers:
        model = adapter.build(tier)
        assert not model.training
        with torch.inference_mode():
            outputs = model(*inputs)
        message = adapter.postprocess(outputs, messages)
        assert [x.shape for x in adapter.example_inputs(tier)] == [x.shape for x in inputs]
        array = decode(bytes(encode(message, adapter.output)), adapter.output)
        assert [marker.action for marker in array.markers] == [3] + [0] * (len(array.markers) - 1)
        assert 4 <= len(array.markers) <= 6
        for index, marker in enumerate(array.markers[1:]):
            assert (marker.id, marker.type, marker.header.frame_id) == (index, 1, "camera_optical_frame")
            assert stamp_ns_of(marker.header) == STAMP_NS
            assert marker.ns == "car"
            assert 0.5 <= marker.color.a <= 1
            assert min(marker.scale.x, marker.scale.y, marker.scale.z, marker.pose.position.z) > 0
            assert marker.lifetime.nanosec == 300_000_000


def test_given_a_box_when_placed_then_similar_triangles_give_its_place():
    adapter = CameraAdapter({"horizontal_fov_deg": 90.0}, CPU)
    messages = received(image(picture(100, 200)))  # focal length: 100 px
    array = adapter.postprocess(cells((0.75, 0.75, 0.5, 0.1, 0.15, 0)), messages)
    marker = array.markers[1]
    distance_m = 100 * KINDS["car"].height_m / 15
    assert marker.ns == "car"
    assert math.isclose(marker.color.a, 0.75)
    assert math.isclose(marker.pose.position.z - marker.scale.z / 2, distance_m, rel_tol=1e-5)
    assert math.isclose(marker.pose.position.x, 50 * distance_m / 100, rel_tol=1e-5)
    assert math.isclose(marker.pose.position.y, 0, abs_tol=1e-5)
    assert math.isclose(marker.scale.y, KINDS["car"].height_m, rel_tol=1e-5)


def test_given_scores_when_postprocessed_then_the_strongest_above_the_threshold_come_first():
    adapter = CameraAdapter({"max_detections": 2, "score_threshold": 0.3}, CPU)
    boxes = [(score, 0.5, 0.5, 0.1, 0.1, kind) for score, kind in ((0.4, 0), (0.2, 1), (0.9, 2), (0.35, 3))]
    array = adapter.postprocess(cells(*boxes), received(image(picture(120, 200))))
    assert [marker.ns for marker in array.markers[1:]] == [CLASSES[2], CLASSES[0]]


def test_given_vision_msgs_when_chosen_then_boxes_are_2d_and_survive_the_wire(vision_msgs):
    adapter = CameraAdapter({"output": "detection2d"}, CPU)
    message = adapter.postprocess(cells((0.75, 0.25, 0.5, 0.1, 0.2, 3)), received(image(picture(100, 200))))
    array = decode(bytes(encode(message, adapter.output)), "vision_msgs/msg/Detection2DArray")
    assert stamp_ns_of(array.header) == STAMP_NS
    box = array.detections[0].bbox
    found = (box.center.position.x, box.center.position.y, box.size_x, box.size_y)
    assert found == pytest.approx((50, 50, 20, 20))
    hypothesis = array.detections[0].results[0].hypothesis
    assert (hypothesis.class_id, hypothesis.score) == ("pedestrian", 0.75)


def test_given_no_vision_msgs_when_chosen_then_construction_says_what_to_install(monkeypatch, tmp_path):
    store = get_typestore(Stores.ROS2_JAZZY)
    monkeypatch.setattr(message_types, "_store", lambda: store)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("AMENT_PREFIX_PATH", raising=False)
    with pytest.raises(UnknownMessageType, match="install vision_msgs"):
        CameraAdapter({"output": "detection2d"}, CPU)


def test_given_an_unknown_tier_when_built_then_the_error_names_it_and_those_that_exist():
    with pytest.raises(ConfigError, match="'huge' does not exist; allowed: full, medium, fast"):
        CameraAdapter({}, CPU).build("huge")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_a_gpu_when_two_frames_follow_each_other_then_each_arrives_as_on_the_cpu():
    adapter = CameraAdapter({}, torch.device("cuda"))
    frames = [image(picture(120, 200)), image(picture(120, 200)[::-1])]
    there = [adapter.preprocess(received(frame))[0] for frame in frames]
    for tensor, frame in zip(there, frames, strict=True):
        assert tensor.is_cuda
        assert_same_picture(tensor.cpu(), seen(frame))


@pytest.mark.parametrize(
    ("options", "shapes"), [({}, [(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH)]), ({"compressed": True}, [])]
)
def test_given_example_messages_when_preprocessed_then_they_are_as_frames_are(options, shapes):
    adapter = CameraAdapter(options, CPU)
    messages = adapter.example_messages()
    assert [tuple(tensor.shape) for tensor in (adapter.preprocess(messages) if messages else ())] == shapes
