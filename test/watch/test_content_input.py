"""What inputs hold, from real messages as CDR bytes, on a virtual clock."""

import io

import numpy as np
import pytest
from PIL import Image as Picture

from torchperf_ros.config.message_types import empty_message, encode, header
from torchperf_ros.frame.alert_rules import Level
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.watch.content_input import InputContent, blindness, raw_points
from torchperf_ros.workers.frame_ring import InputBytes

from ..safety.sensor_messages import cloud_bytes

IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
CLOUD, ODOMETRY = "sensor_msgs/msg/PointCloud2", "nav_msgs/msg/Odometry"
START_NS = 1_000 * NS_PER_S
RNG = np.random.default_rng(0)


def picture(pixels, encoding="rgb8"):
    """An image message of an array of rows, columns and channels."""

    return lambda stamp_ns: bytes(encode(image(pixels, encoding, header=header(stamp_ns, "camera")), IMAGE))


def image(pixels, encoding, **own):
    height, width = pixels.shape[:2]
    data = np.ascontiguousarray(pixels).view(np.uint8).reshape(-1)
    own |= {"height": height, "width": width, "encoding": encoding, "step": len(data) // height, "data": data}
    return empty_message(IMAGE, **own)


def scene(kind=np.uint8, channels=3, high=255):
    return RNG.integers(0, high, (120, 160, channels)).astype(kind)


def changing(_):
    """Another picture each time."""
    return picture(scene())


def jpeg(pixels):
    file = io.BytesIO()
    Picture.fromarray(pixels).save(file, "JPEG")
    data = np.frombuffer(file.getvalue(), np.uint8)
    return lambda stamp_ns: bytes(
        encode(empty_message(COMPRESSED, header=header(stamp_ns, "camera"), format="jpeg", data=data), COMPRESSED)
    )


def cloud(points):
    """A cloud of an array of points of x, y, z."""
    return lambda stamp_ns: cloud_bytes(points, fields="xyz", stamp_ns=stamp_ns)


def watch(type_name, at, seconds=5.0, rate_hz=10.0, trigger=True, stamp=lambda now_ns: now_ns):
    """What is found, by second; `at(t)` makes the message of that time."""
    content = InputContent("camera", "/in", type_name, trigger=trigger)
    found = {}
    for number in range(round(seconds * rate_hz)):
        now_ns = START_NS + round(number * NS_PER_S / rate_hz)
        stamp_ns = stamp(now_ns)
        content.take(InputBytes(0, stamp_ns, 0.0, at(number / rate_hz)(stamp_ns)), now_ns)
        if number % round(rate_hz) == round(rate_hz) - 1:
            for finding in content.alerts(now_ns):
                found.setdefault(finding.name, []).append((number // round(rate_hz), finding))
    return found


STILL = picture(scene())
PIXELS = scene()


def one_byte(t):
    """A picture that differs from the one before in one byte."""
    PIXELS[70, 31, 1] = round(10 * t) % 256
    return picture(PIXELS)


def lit(_):
    """A dark picture with a light in it."""
    pixels = scene(high=4)
    pixels[40:60, 50:80] = 90
    return picture(pixels)


@pytest.mark.parametrize(
    ("type_name", "at"),
    [
        (IMAGE, changing),
        (IMAGE, one_byte),
        (IMAGE, lit),
        (IMAGE, lambda t: STILL if 3 <= t < 3.9 else changing(t)),  # less than a second
        (CLOUD, lambda _: cloud([[np.nan] * 3] * 30 + RNG.random((3, 3)).tolist())),
    ],
)
def test_given_inputs_as_they_should_be_when_watched_then_nothing_is_told(type_name, at):
    assert watch(type_name, at, seconds=8) == {}


def test_given_equal_images_with_new_stamps_when_a_second_has_passed_then_they_are_frozen_until_another_comes():
    still = picture(scene())
    found = watch(IMAGE, lambda t: still if 3 <= t < 6 else changing(t), seconds=10)
    told = found.pop("camera: input frozen")
    assert found == {}
    assert [second for second, _ in told] == [4, 5]
    assert told[0][1].level is Level.ERROR
    assert "/in is frozen" in told[0][1].message


def test_given_equal_compressed_images_when_they_go_on_then_they_are_frozen():
    still = jpeg(scene())
    assert set(watch(COMPRESSED, lambda _: still)) == {"camera: input frozen"}


@pytest.mark.parametrize(
    ("type_name", "at", "name", "level"),
    [
        (IMAGE, lambda _: picture((scene(high=4)).astype(np.uint8)), "camera: input black", Level.ERROR),
        (IMAGE, lambda _: picture(scene(high=4) + 252), "camera: input white", Level.ERROR),
        (IMAGE, lambda _: picture(np.where(scene(channels=1) < 230, 255, scene(channels=1)), "mono8"),
         "camera: input saturated", Level.WARN),
        (IMAGE, lambda _: picture(scene(high=3) + 120), "camera: input featureless", Level.ERROR),
        (COMPRESSED, lambda _: jpeg(scene(high=4)), "camera: input black", Level.ERROR),
        (CLOUD, lambda t: cloud([]), "camera: input empty", Level.ERROR),
        (CLOUD, lambda t: cloud([[np.nan] * 3] * 50), "camera: input empty", Level.ERROR),
    ],
)  # fmt: skip
def test_given_an_input_that_shows_nothing_when_a_second_has_passed_then_it_is_told(type_name, at, name, level):
    told = watch(type_name, at)[name]
    assert told[0][0] <= 1
    assert told[0][1].level is level


@pytest.mark.parametrize(
    ("encoding", "pixels"),
    [
        ("mono8", scene(channels=1)), ("bgra8", scene(channels=4)), ("bayer_rggb8", scene(channels=1)),
        ("mono16", scene(np.uint16, 1, 60_000)), ("16UC1", scene(np.uint16, 1, 9_000)), ("8UC3", scene()),
        ("32FC1", scene(np.float32, 1, 90)), ("yuv422", scene(channels=2)), ("yuv422_yuy2", scene(channels=2)),
    ],
)  # fmt: skip
def test_given_a_common_encoding_when_looked_at_then_noise_is_seen_and_black_is_black(encoding, pixels):
    points = raw_points(image(pixels, encoding))
    assert blindness(points) == ""
    assert 0.0 <= points.min() <= points.max() <= 1.0
    assert points.size <= 70_000
    black = np.zeros_like(pixels)
    if encoding.startswith("yuv"):
        black[..., 0 if encoding == "yuv422" else 1] = 128  # grey in colour, black in brightness
    assert blindness(raw_points(image(black, encoding))) == "black"


def test_given_an_image_that_is_too_short_or_unknown_when_looked_at_then_nothing_is_said():
    message = empty_message(IMAGE, height=4, width=4, encoding="rgb8", step=12, data=np.zeros(40, np.uint8))
    assert raw_points(message) is None
    assert watch(COMPRESSED, lambda t: lambda stamp_ns: jpeg(scene())(stamp_ns)[:200] + bytes([round(10 * t)])) == {}


def test_given_another_input_whose_stamp_stands_still_when_a_second_has_passed_then_it_is_told_with_its_topic():
    def stamp(now_ns):
        return min(now_ns, START_NS + 3 * NS_PER_S)

    found = watch(ODOMETRY, lambda _: lambda stamp_ns: b"", stamp=stamp, trigger=False, seconds=8)
    told = found.pop("camera: input stands still (/in)")
    assert found == {}
    assert told[0][0] == 4
    assert "usually there is a new one every 100 ms" in told[0][1].message


@pytest.mark.parametrize(
    ("stamp", "data"), [(lambda now_ns: now_ns, b"the same pose"), (lambda _: START_NS, b"")], ids=["pose", "map"]
)
def test_given_a_vehicle_that_stands_or_a_map_that_is_sent_once_when_watched_then_nothing_is_told(stamp, data):
    assert watch(ODOMETRY, lambda _: lambda stamp_ns: data, stamp=stamp, trigger=False, seconds=30) == {}
