"""What inputs hold, from real messages as CDR bytes, on a virtual clock."""

import itertools
import math
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import empty_message, encode, header, message_class
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.models.detection_messages import MARKER_ARRAY, Detection, ImageFrame, MarkerArrays
from torchperf_ros.observe.watch.content import (
    InputContent,
    OutputContent,
    blindness,
    raw_picture,
    statistics_of,
)
from torchperf_ros.workers.frame_ring import InputBytes

from ...api.test_pixels import compressed, file_of, image
from ...safety.sensor_messages import cloud_bytes
from ..telemetry.frame_records import frame_record

IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
CLOUD, ODOMETRY = "sensor_msgs/msg/PointCloud2", "nav_msgs/msg/Odometry"
START_NS = 1_000 * NS_PER_S
RNG = np.random.default_rng(0)


def picture(pixels, encoding="rgb8"):
    """An image message of an array of rows, columns and channels."""

    return lambda stamp_ns: bytes(encode(image(encoding, pixels, header=header(stamp_ns, "camera")), IMAGE))


def scene(kind=np.uint8, channels=3, high=255):
    """What a camera could see: things of 8 x 8 pixels, and the noise of its sensor."""
    things = RNG.random((15, 20, channels)).repeat(8, axis=0).repeat(8, axis=1)
    return (high * (0.95 * things + 0.05 * RNG.random((120, 160, channels)))).astype(kind)


def noise(kind=np.uint8, channels=3, high=256):
    """What a broken cable brings."""
    return RNG.integers(0, high, (120, 160, channels)).astype(kind)


def changing(_):
    """Another picture each time."""
    return picture(scene())


def jpeg(pixels):
    data = file_of(pixels, "JPEG")
    return lambda stamp_ns: bytes(encode(compressed(data, header=header(stamp_ns, "camera")), COMPRESSED))


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
            for finding in content.second(now_ns)[1]:
                found.setdefault(finding.name, []).append((number // round(rate_hz), finding))
    return found


STILL = picture(scene())
SCENE = scene()
SCENES = itertools.cycle([scene() for _ in range(37)])


def another():
    """Another scene each time."""
    return next(SCENES).copy()


def seen(t, pixels=SCENE):
    """The same scene once more, with the noise of a sensor."""
    return np.clip(pixels + RNG.integers(-2, 3, pixels.shape), 0, 255).astype(np.uint8)


def bonnet(_):
    """A moving scene above something that never changes, and black bars beside it."""
    pixels = another()
    pixels[90:] = SCENE[90:]
    pixels[:, :20] = pixels[:, -20:] = 0
    return picture(pixels)


def clock(t):
    """A live picture with the seconds drawn into it."""
    pixels = seen(t)
    pixels[4:14, 4:60] = 0
    pixels[6:12, 6 : 8 + round(t) % 50] = 255
    return picture(pixels)


def at_rest(t):
    """A vehicle that stops, seen by a camera without noise: its parts come to rest one after the other."""
    pixels = SCENE.copy() if t >= 4 else another()
    moving = max(0, round(120 * (1 - (t - 4) / 3)))
    pixels[:moving] = another()[:moving]
    pixels[40:80, round(5 * t) : round(5 * t) + 30] = another()[40:80, :30]  # somebody walks by
    return picture(pixels)


def tunnel_exit(t):
    """Half of the picture is overexposed for four seconds."""
    pixels = another()
    if 4 <= t < 8:
        pixels[:60] = 255
    return picture(pixels)


def wiper(t):
    """At night, in the rain."""
    pixels = seen(t) // 8
    pixels[30:40, 20:60] = 200
    pixels[:, round(40 * t) % 140 :][:, :20] = 3
    return picture(pixels)


def depth(t):
    """A wall in front of the camera, where it sees anything."""
    pixels = np.full((120, 160, 1), 1200) + RNG.integers(0, 3, (120, 160, 1))
    pixels[RNG.random((120, 160, 1)) < 0.3] = 0
    return picture(pixels.astype(np.uint16), "16UC1")


def sparse_depth(_):
    """The points of a laser in the picture of a camera; the others are infinitely far."""
    pixels = np.where(RNG.random((120, 160, 1)) < 0.1, 50 * RNG.random((120, 160, 1)), np.inf)
    return picture(pixels.astype(np.float32), "32FC1")


def events(_):
    """Of an event camera."""
    return picture(np.where(RNG.random((120, 160, 1)) < 0.1, 255, 128).astype(np.uint8), "mono8")


def carpet(_):
    """The ground below a robot: at an eighth of its size it looks like noise."""
    pixels = RNG.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    return jpeg(pixels.repeat(8, axis=0).repeat(8, axis=1))


def lit(_):
    """A dark picture with a light in it."""
    pixels = scene(high=4)
    pixels[40:60, 50:80] = 90
    return picture(pixels)


@pytest.mark.parametrize(
    ("type_name", "at"),
    [
        (IMAGE, changing),
        (IMAGE, lambda t: picture(seen(t))),
        *(
            (IMAGE, at)
            for at in (lit, bonnet, clock, at_rest, tunnel_exit, wiper, depth, sparse_depth, events)
        ),
        (IMAGE, lambda t: picture(seen(t)[..., :1], "bayer_rggb8")),
        (COMPRESSED, lambda t: jpeg(seen(t))),
        (COMPRESSED, carpet),
        (IMAGE, lambda t: STILL if 3 <= t < 3.9 else changing(t)),  # less than a second
        (CLOUD, lambda _: cloud([[np.nan] * 3] * 30 + RNG.random((3, 3)).tolist())),
    ],
)
def test_given_inputs_as_they_should_be_when_watched_then_nothing_is_told(type_name, at):
    assert watch(type_name, at, seconds=14) == {}


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


def boxed(pixels):
    """With black bars above and below."""
    pixels[:15] = pixels[-15:] = 0
    return pixels


def frozen(where, overlay=False, whole=another):
    """A scene of which a part freezes between the 5th and the 12th second."""
    kept = []

    def at(t):
        pixels = whole()
        kept[:] = kept if 5 <= t < 12 else [pixels.copy()]
        pixels[where] = kept[0][where]
        if overlay:
            pixels[70, 31] = round(10 * t) % 250
        return pixels

    return at


LOWER, LEFT, ALL = np.s_[60:], np.s_[:, :80], np.s_[:]


@pytest.mark.parametrize("make", [picture, jpeg])
@pytest.mark.parametrize(
    ("at", "text"),
    [
        (
            frozen(LOWER),
            r"(50|38)% of the picture of /in is frozen \(x 0 to 100, y (50|62) to 100 %\), since",
        ),
        (frozen(LEFT), r"50% of the picture of /in is frozen \(x 0 to 50, y 0 to 100 %\), since"),
        (frozen(ALL, overlay=True), r"(9.|100)% of .* \(x 0 to 100, y 0 to 100 %\), since"),
        # At a standstill, where only the noise has moved.
        (
            frozen(ALL, overlay=True, whole=lambda: seen(0)),
            r"(9.|100)% of .* \(x 0 to 100, y 0 to 100 %\), since",
        ),
    ],
)
def test_given_a_part_of_the_picture_that_freezes_when_seconds_have_passed_then_it_is_told_until_it_moves(
    at, text, make
):
    type_name = IMAGE if make is picture else COMPRESSED
    found = watch(type_name, lambda t: make(at(t)), seconds=20)
    told = found.pop("camera: input frozen")
    assert found == {}
    assert 7 <= told[0][0] <= 9
    assert told[-1][0] in {11, 12}
    assert re.match(text, told[-1][1].message)
    assert told[0][1].level is Level.ERROR


def test_given_a_picture_that_stands_but_for_a_clock_when_it_has_from_the_start_then_it_is_told():
    def at(t):
        pixels = SCENE.copy()
        pixels[70, 31] = round(10 * t) % 250
        return picture(pixels if t < 14 else another())

    ((name, told),) = watch(IMAGE, at, seconds=20).items()
    assert name == "camera: input frozen"
    assert (told[0][0], told[-1][0]) == (10, 13)


@pytest.mark.parametrize(
    ("type_name", "at", "name", "level"),
    [
        (IMAGE, lambda _: picture(noise(high=13)), "camera: input black", Level.ERROR),
        (IMAGE, lambda _: picture(noise(high=4) + 252), "camera: input white", Level.ERROR),
        (
            IMAGE,
            lambda _: picture(np.where(scene(channels=1) < 230, 255, scene(channels=1)), "mono8"),
            "camera: input saturated",
            Level.WARN,
        ),
        (IMAGE, lambda _: picture(noise(high=3) + 120), "camera: input featureless", Level.ERROR),
        (COMPRESSED, lambda _: jpeg(noise(high=13)), "camera: input black", Level.ERROR),
        (IMAGE, lambda _: picture(noise()), "camera: input noise", Level.ERROR),
        (IMAGE, lambda _: picture(noise(channels=1), "bayer_rggb8"), "camera: input noise", Level.ERROR),
        (
            IMAGE,
            lambda _: picture(noise(np.uint16, 1, 60_000), "mono16"),
            "camera: input noise",
            Level.ERROR,
        ),
        (IMAGE, lambda _: picture(noise(channels=2), "yuv422"), "camera: input noise", Level.ERROR),
        (IMAGE, lambda _: picture(boxed(noise())), "camera: input noise", Level.ERROR),
        (COMPRESSED, lambda _: jpeg(noise()), "camera: input noise", Level.ERROR),
        (CLOUD, lambda t: cloud([]), "camera: input empty", Level.ERROR),
        (CLOUD, lambda t: cloud([[np.nan] * 3] * 50), "camera: input empty", Level.ERROR),
    ],
)
def test_given_an_input_that_shows_nothing_when_a_second_has_passed_then_it_is_told(
    type_name, at, name, level
):
    told = watch(type_name, at)[name]
    assert told[0][0] <= 1
    assert told[0][1].level is level


@pytest.mark.parametrize(
    ("encoding", "pixels"),
    [
        ("mono8", scene(channels=1)),
        ("bgra8", scene(channels=4)),
        ("bayer_rggb8", scene(channels=1)),
        ("mono16", scene(np.uint16, 1, 60_000)),
        ("16UC1", scene(np.uint16, 1, 9_000)),
        ("8UC3", scene()),
        ("rgb16", scene(np.uint16, 3, 60_000)),
        ("32FC1", scene(np.float32, 1, 90)),
        ("yuv422", scene(channels=2)),
        ("yuv422_yuy2", scene(channels=2)),
    ],
)
def test_given_a_common_encoding_when_looked_at_then_a_scene_is_seen_and_black_is_black(encoding, pixels):
    seen = raw_picture(image(encoding, pixels))
    assert blindness(seen) == ""
    assert 0.0 <= seen.values.min() <= seen.values.max() <= seen.scale
    black = np.zeros_like(pixels)
    if encoding.startswith("yuv"):
        black[..., 0 if encoding == "yuv422" else 1] = 128  # grey in colour, black in brightness
    if encoding == "bgra8":
        black[..., 3] = 255  # opaque
    assert blindness(raw_picture(image(encoding, black))) == "black"


def test_given_an_image_that_is_too_short_or_unknown_when_looked_at_then_nothing_is_said():
    message = empty_message(IMAGE, height=4, width=4, encoding="rgb8", step=12, data=np.zeros(40, np.uint8))
    assert raw_picture(message) is None
    assert (
        watch(COMPRESSED, lambda t: lambda stamp_ns: jpeg(scene())(stamp_ns)[:200] + bytes([round(10 * t)]))
        == {}
    )


def test_given_another_input_whose_stamp_stands_still_when_a_second_has_passed_then_it_is_told_with_its_topic():
    def stamp(now_ns):
        return min(now_ns, START_NS + 3 * NS_PER_S)

    found = watch(ODOMETRY, lambda _: lambda stamp_ns: b"", stamp=stamp, trigger=False, seconds=8)
    told = found.pop("camera: input stands still (/in)")
    assert found == {}
    assert told[0][0] == 4
    assert "usually there is a new one every 100 ms" in told[0][1].message


@pytest.mark.parametrize(
    ("stamp", "data"),
    [(lambda now_ns: now_ns, b"the same pose"), (lambda _: START_NS, b"")],
    ids=["pose", "map"],
)
def test_given_a_vehicle_that_stands_or_a_map_that_is_sent_once_when_watched_then_nothing_is_told(
    stamp, data
):
    assert watch(ODOMETRY, lambda _: lambda stamp_ns: data, stamp=stamp, trigger=False, seconds=30) == {}


# -- outputs


MARKERS = MarkerArrays(70.0)


def detections(count, score=0.8, x=50.0):
    return [Detection(number % 4, score, x, 60.0, 20.0, 30.0) for number in range(count)]


def boxes(stamp_ns, found):
    return bytes(encode(MARKERS.build(found, ImageFrame(stamp_ns, "camera", 640, 480)), MARKER_ARRAY))


def drive(seconds, at, fallback=None):
    """What is found, by second.

    `at(second, rng)` gives the detections of a frame and the bytes of its input.
    """
    content, rng, found = OutputContent("camera", "/detections", MARKER_ARRAY), random.Random(0), {}
    for second in range(seconds):
        for part in range(4):
            now_ns = 1_000 * NS_PER_S + second * NS_PER_S + part * NS_PER_S // 4
            things, data = at(second, rng)
            content.take(
                frame_record(
                    now_ns,
                    stamp_ns=now_ns,
                    received_ns=now_ns,
                    fallback=fallback,
                    outcome=Outcome.ON_TIME if fallback is None else Outcome.LATE,
                    inputs=[InputBytes(0, now_ns, 0.0, data)],
                    payload=boxes(now_ns, things),
                )
            )
        for finding in content.second(now_ns)[1]:
            found.setdefault(finding.name, []).append((second, finding))
    return found


def usual(second, rng):
    """Some objects, now more and now fewer, with scores that vary."""
    count = 6 + round(2 * math.sin(second / 40)) + rng.randint(-1, 1)
    return detections(count, min(1.0, rng.gauss(0.8, 0.03)), rng.random()), rng.randbytes(100)


def test_given_minutes_of_a_changing_scene_when_watched_then_nothing_is_told():
    assert drive(600, usual) == {}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda rng: detections(20, 0.8, rng.random()), "objects per output 20.0, usually"),
        (lambda rng: detections(6, 0.55, rng.random()), "mean score of the outputs 0.55, usually 0.80"),
    ],
)
def test_given_outputs_unlike_before_when_they_go_on_then_it_is_told(fault, words):
    def at(second, rng):
        return (fault(rng), rng.randbytes(100)) if second >= 300 else usual(second, rng)

    told = drive(360, at)["camera: output"]
    assert 308 <= told[0][0] <= 330
    assert words in told[0][1].message


def frozen_from(begin, things, data):
    return lambda second, rng: (things, data(rng)) if second >= begin else usual(second, rng)


def test_given_equal_outputs_of_changing_inputs_when_they_go_on_then_they_are_frozen():
    told = drive(80, frozen_from(40, detections(6), lambda rng: rng.randbytes(100)))[
        "camera: output frozen"
    ]
    assert 49 <= told[0][0] <= 51
    assert "/detections has not changed although its inputs have, since 1" in told[0][1].message


def test_given_outputs_without_objects_when_longer_than_ever_then_it_is_told_until_there_are_some():
    def at(second, rng):
        return (
            (detections(0), rng.randbytes(100))
            if 40 <= second < 43 or 80 <= second < 100
            else usual(second, rng)
        )

    told = drive(120, at)["camera: output empty"]
    assert [told[0][0], told[-1][0]] == [90, 99]
    assert "holds nothing any more, since 11 s; 3.0 s at most before" in told[0][1].message


@pytest.mark.parametrize(
    ("things", "data"),
    [
        (detections(6), lambda rng: bytes(100)),  # the inputs stand still, too
        (detections(0), lambda rng: rng.randbytes(100)),  # there is nothing to see
    ],
)
def test_given_equal_outputs_for_a_reason_when_watched_then_they_are_not_frozen(things, data):
    assert "camera: output frozen" not in drive(80, frozen_from(40, things, data))


def test_given_markers_when_counted_then_what_is_deleted_is_no_object_and_alpha_is_the_score():
    message = MARKERS.build(detections(3, 0.5), ImageFrame(1, "camera", 640, 480))
    assert statistics_of(message, MARKER_ARRAY) == (3.0, [0.5, 0.5, 0.5])


def test_given_any_message_when_counted_then_scores_are_those_within_its_list_and_without_one_nothing_is_known():
    hypotheses = [SimpleNamespace(class_id="car", score=0.25), SimpleNamespace(class_id="bus", score=0.5)]
    results = [SimpleNamespace(hypothesis=hypothesis, pose=np.zeros(3)) for hypothesis in hypotheses]
    message = SimpleNamespace(
        header=None, detections=[SimpleNamespace(results=results), SimpleNamespace(results=[])]
    )
    assert statistics_of(message, "vision_msgs/msg/Detection2DArray") == (2.0, [0.25, 0.5])
    count, scores = statistics_of(message_class("geometry_msgs/msg/Point")(x=1.0, y=2.0, z=np.nan), "")
    assert math.isnan(count)
    assert scores == []
