"""Messages are compared as their types mean it: order, signs, wraps and tolerances."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import UnknownMessageType
from torchperf_ros.api.messages import message_class
from torchperf_ros.replay.golden.message_rule import (
    BUILT_IN,
    ImageTolerance,
    MessageRule,
    RuleError,
    Tolerance,
    check_rules,
    compare_messages,
)

from .made_outputs import (
    ARRAY,
    COMPRESSED,
    IMAGE,
    MARKERS,
    PATH,
    POSE_2D,
    array,
    image,
    jpeg,
    marker,
    markers,
    path,
    point,
    pose,
)

INT64 = "std_msgs/msg/Int64MultiArray"


def found(message, golden, rules=BUILT_IN):
    return list(compare_messages(message, golden, rules))


def paths(message, golden, rules=BUILT_IN):
    return [difference.path for difference in found(message, golden, rules)]


def test_given_a_nested_field_off_by_more_than_allowed_when_compared_then_path_values_and_tolerance_are_told():
    (difference,) = found(path(pose(1.0), pose(2.5)), path(pose(1.0), pose(2.0)))
    assert difference.path == "poses[1].pose.position.x"
    assert difference.field == "poses[].pose.position.x"
    assert (difference.value, difference.golden) == (2.5, 2.0)
    assert difference.error == pytest.approx(0.5)
    assert difference.allowed == pytest.approx(1e-3 + 2e-3)


def rule(kind, **how):
    return {kind: MessageRule(**how)}


def tolerances(**by_path):
    return rule(
        PATH, tolerances={name.replace("__", "."): Tolerance(*pair) for name, pair in by_path.items()}
    )


LAYOUT = array().layout
BIG, BIGGER = (message_class(INT64)(LAYOUT, np.array([2**60 + more], np.int64)) for more in (0, 1))
TURN = (0.1, -0.2, 0.3, -0.9)
STAMPED, LATER = path(pose(), stamp_ns=5), path(pose(), stamp_ns=7)
SHORT, LONG = path(pose(2.0, 2.0)), path(pose(2.5, 2.5))
POINTS = rule("geometry_msgs/msg/Point", tolerances={"": Tolerance(absolute=1.0)})
X, Y = "poses[0].pose.position.x", "poses[0].pose.position.y"
SAME_OR_NOT = [
    # the usual tolerance: at zero a thousandth
    (array(0.9e-3), array(0.0), BUILT_IN, []), (array(1.1e-3), array(0.0), BUILT_IN, ["data[0]"]),
    (array(math.nan), array(0.0), BUILT_IN, ["data[0]"]), (array(-math.inf), array(0.0), BUILT_IN, ["data[0]"]),
    # numbers that are none, in an array and alone
    *[(make(value), make(golden), BUILT_IN, [name] * differs)
      for make, name in ((array, "data[0]"), (point, "x"))
      for value, golden, differs in [
          (math.nan, math.nan, 0), (math.inf, math.inf, 0), (0.0, -0.0, 0),
          (math.inf, -math.inf, 1), (1.0, math.nan, 1), (1e300, math.inf, 1)]],
    # whole numbers, also beyond the precision of a float, texts and lengths
    (image(1, 2, 4), image(1, 2, 3), {}, ["data[2]"]), (BIG, BIGGER, BUILT_IN, ["data[0]"]),
    (array(1.0, label="b"), array(1.0), rule(ARRAY, tolerances={"": Tolerance(10.0)}), ["layout.dim[0].label"]),
    (array(1.0, 2.0), array(1.0), rule(ARRAY, tolerances={"": Tolerance(10.0)}),
     ["layout.dim[0].size", "layout.dim[0].stride", "data"]),
    (path(pose()), path(pose(), pose()), BUILT_IN, ["poses"]),
    # of tolerances by path the longest one counts
    (LONG, SHORT, rule(PATH, tolerances={"": Tolerance(1.0)}), []), (LONG, SHORT, tolerances(poses=(1.0,)), []),
    (LONG, SHORT, tolerances(poses__pose=(1.0,), poses__pose__position__x=(0.1,)), [X]),
    (LONG, SHORT, tolerances(poses__pose__position__x=(1.0,)), [Y]),
    (LONG, SHORT, tolerances(poses__pose__pos=(1.0,)), [X, Y]),
    (LONG, SHORT, tolerances(poses__pose__position=(0.0, 0.3)), []),
    # of rules for an inner and an outer type the outer one
    (LONG, SHORT, POINTS, []), (LONG, SHORT, {**POINTS, **tolerances(poses=())}, [X, Y]),
    # ignored fields
    (STAMPED, LATER, BUILT_IN, ["header.stamp", "poses[0].header.stamp"]),
    (STAMPED, LATER, rule(PATH, ignore=("header.stamp", "poses.header")), []),
    (STAMPED, LATER, rule("std_msgs/msg/Header", ignore=("stamp",)), []),
    # a quaternion and its negative
    (pose(turn=TURN), pose(turn=tuple(-axis for axis in TURN)), BUILT_IN, []),
    (pose(turn=TURN), pose(turn=(-0.1, 0.2, -0.3, 0.8)), BUILT_IN, ["orientation.w"]),
    # of an image one pixel is off by 10 and one by 2
    *[(image(10, 20, 42, 30), image(10, 20, 40, 40), rule(IMAGE, images={"": ImageTolerance(share, by)}), differs)
      for share, by, differs in [(0.0, 0, ["data"]), (0.0, 9, ["data"]), (0.0, 10, []),
                                 (0.24, 9, ["data"]), (0.25, 9, []), (0.25, 1, ["data"])]],
]  # fmt: skip


@pytest.mark.parametrize(("message", "golden", "rules", "differing"), SAME_OR_NOT)
def test_given_two_messages_when_compared_then_only_what_rules_do_not_allow_differs(
    message, golden, rules, differing
):
    assert paths(message, golden, rules) == differing


def test_given_stamps_on_both_sides_of_a_second_when_they_differ_then_it_is_one_difference_in_seconds():
    difference, _ = found(path(pose(), stamp_ns=1_990_000_000), path(pose(), stamp_ns=2_010_000_000))
    assert (difference.path, difference.value, difference.golden) == (
        "header.stamp",
        "1.990000000",
        "2.010000000",
    )
    assert (difference.error, difference.allowed) == (pytest.approx(0.02), 0.0)


def test_given_an_image_without_a_rule_of_the_user_s_when_it_differs_then_the_worst_pixel_and_the_share_are_told():
    (difference,) = found(image(10, 20, 42, 30), image(10, 20, 40, 40))
    assert (difference.path, difference.value) == ("data", "(30) at row 0, column 3")
    assert difference.golden == "(40)"
    assert difference.shown == ("50 % of 4 pixels", "0 %, or any by 0")
    assert paths(image(1, 2), image(1, 2, 3)) == ["width", "step", "data"]


def test_given_images_of_any_encoding_when_compared_then_a_pixel_is_all_its_channels_and_padding_is_none():
    one = image(*b"\x01\x02\x03\x04\x05\x06\x09\x09", width=2, encoding="rgb8")
    other = image(*b"\x01\x02\x03\x04\x07\x08\x00\x00", width=2, encoding="rgb8")
    (difference,) = found(one, other)
    assert (difference.value, difference.golden) == ("(4, 5, 6) at row 0, column 1", "(4, 7, 8)")
    assert difference.shown[0] == "50 % of 2 pixels"
    depths = [np.array([1.5, metres, math.nan], "<f4").tobytes() for metres in (2.0, 2.25)]
    one, other = (image(*data, width=3, encoding="32FC1") for data in depths)
    assert found(one, other)[0].value == "(2) at row 0, column 1"
    assert found(one, other, {IMAGE: MessageRule(images={"": ImageTolerance(by=0.25)})}) == []
    near = image(*np.array([1.5, 2.251, math.nan], "<f4").tobytes(), width=3, encoding="32FC1")
    assert found(near, other) == []  # as other floating-point numbers
    assert found(near, other, {IMAGE: MessageRule(images={"": ImageTolerance(by=0.0)})})
    (difference,) = found(one, other)
    assert difference.shown == ("33.33 % of 3 pixels", "0 %, or any by 0.001 + 0.001 of its value")
    hole = image(*np.array([1.5, math.inf, 1.0], "<f4").tobytes(), width=3, encoding="32FC1")
    assert found(hole, hole) == []
    assert found(hole, other)[0].shown[0] == found(other, hole)[0].shown[0] == "66.67 % of 3 pixels"
    unknown = [
        image(*data, width=2, encoding="uyvy") for data in (b"\x01\x02\x03\x04", b"\x01\x02\x05\x04")
    ]
    assert found(*unknown)[0].shown[0] == "25 % of 4 bytes"


def test_given_jpegs_when_a_rule_names_the_type_then_their_pixels_are_compared_and_else_their_bytes():
    one, other, small = (jpeg(grey, size) for grey, size in ((100, (16, 8)), (102, (16, 8)), (100, (8, 8))))
    rules = {COMPRESSED: MessageRule(images={"": ImageTolerance(by=4)})}
    assert found(one, other)
    assert found(one, other, rules) == []
    (difference,) = found(one, small, rules)
    assert (difference.value, difference.golden) == ("16 x 8 pixels", "8 x 8 pixels")


@given(st.permutations(range(5)))
def test_given_markers_in_another_order_when_compared_then_they_are_the_same(order):
    items = [marker(float(index), number=index) for index in range(5)]
    moved = [marker(float(index) + 0.0005, number=place, lifetime_s=9) for place, index in enumerate(order)]
    assert found(markers(*moved), markers(*items)) == []


def test_given_markers_when_one_is_elsewhere_missing_or_another_action_then_it_is_a_difference():
    golden = markers(marker(1.0), marker(5.0, 2.0))
    assert paths(markers(marker(5.0, 2.6), marker(1.0)), golden) == ["markers[1].pose.position.y"]
    (missing,) = found(markers(marker(1.0)), golden)
    assert (missing.path, missing.value, missing.golden) == ("markers", "1 elements", "2 elements")
    assert found(markers(), markers()) == []
    clear = marker(action=3)  # at the place of a box
    assert found(markers(marker(), clear), markers(clear, marker())) == []
    assert paths(markers(marker(), marker()), markers(clear, marker())) == ["markers[0].action"]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            {MARKERS: MessageRule(ignore=("markers.id", "marker.id"))},
            "'marker.id' is no field, as there is no 'marker'; .*MarkerArray has: markers",
        ),
        (
            {MARKERS: MessageRule(ignore=("markers.id.x",))},
            "as there is no 'x'; what is before it is a plain value",
        ),
        ({POSE_2D: MessageRule(ignore=("yaw",))}, "Pose2D has: x, y, theta"),
        (
            {MARKERS: MessageRule(images={"markers": ImageTolerance()})},
            "'markers' is no image, but visualization_msgs",
        ),
    ],
)
def test_given_a_rule_that_names_a_field_that_is_not_there_when_checked_then_the_error_says_what_there_is(
    rules, words
):
    with pytest.raises(RuleError, match=words):
        check_rules(rules)


def test_given_the_built_in_rules_when_checked_then_every_field_is_there():
    known = {name: rule for name, rule in BUILT_IN.items() if not name.startswith("vision_msgs")}
    check_rules(
        known | {MARKERS: MessageRule(tolerances={"": Tolerance(), "markers.pose.position.x": Tolerance()})}
    )
    with pytest.raises(UnknownMessageType, match="my_msgs"):
        check_rules({"my_msgs/msg/Heading": MessageRule(ignore=("yaw",))})
