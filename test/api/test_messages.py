import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.errors import BadInput, UnknownMessageType
from torchperf_ros.api.messages import (
    decode,
    empty_message,
    encode,
    field_types,
    full_name,
    has_header,
    header,
    message_class,
    stamp_ns_of,
    warm_up,
)

STORE = get_typestore(Stores.ROS2_HUMBLE)
SOME = [
    "std_msgs/msg/Header",
    "std_msgs/msg/String",
    "std_msgs/msg/Float64MultiArray",
    "sensor_msgs/msg/Image",
    "sensor_msgs/msg/PointCloud2",
    "nav_msgs/msg/Path",
    "nav_msgs/msg/Odometry",
    "diagnostic_msgs/msg/DiagnosticArray",
    "sensor_msgs/msg/CompressedImage",
    "tf2_msgs/msg/TFMessage",
]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write `.msg` files into a share folder, as an installed package has them."""
    monkeypatch.setenv("AMENT_PREFIX_PATH", f":{tmp_path / 'empty'}:{tmp_path}")

    def write(package, **messages):
        folder = tmp_path / "share" / package / "msg"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in messages.items():
            (folder / f"{name}.msg").write_text(text, encoding="utf-8")

    return write


def test_given_an_image_when_decoded_then_the_pixels_are_a_view_on_the_bytes():
    pixels = np.arange(24, dtype=np.uint8)
    fields = {
        "header": header(5, "camera"),
        "height": 2,
        "width": 4,
        "encoding": "rgb8",
        "step": 12,
        "data": pixels,
    }
    data = bytearray(
        STORE.serialize_cdr(empty_message("sensor_msgs/msg/Image", **fields), "sensor_msgs/msg/Image")
    )
    found = decode(memoryview(data), "sensor_msgs/msg/Image")
    assert (found.height, found.width, found.encoding, found.header.frame_id) == (2, 4, "rgb8", "camera")
    assert found.data.tolist() == pixels.tolist()
    data[-1] = 99
    assert found.data[-1] == 99


def test_given_a_message_when_encoded_then_another_reader_decodes_it():
    data = bytes(encode(header(1_000_000_002, "map"), "std_msgs/msg/Header"))
    found = STORE.deserialize_cdr(data, "std_msgs/msg/Header")
    assert (found.stamp.sec, found.stamp.nanosec, found.frame_id) == (1, 2, "map")


@settings(deadline=None, max_examples=200)
@given(
    name=st.sampled_from(SOME),
    data=st.binary(max_size=200),
    head=st.sampled_from([b"", b"\x00\x00\x00\x00", b"\x00\x01\x00\x00"]),
)
def test_given_any_bytes_when_decoded_then_they_are_a_message_or_bad_input(name, data, head):
    try:
        message = decode(head + data, name)
    except BadInput as error:
        assert f"not a {name}: {len(head + data)} bytes" in str(error)  # noqa: PT017 - either end is right
    else:
        assert type(message) is message_class(name)


def test_given_a_message_cut_short_when_decoded_then_it_is_bad_input():
    for name in SOME:
        for data in (b"\x00\x01\x00\x00\x01", b""):
            with pytest.raises(BadInput, match=f"not a {name}: {len(data)} bytes that do not decode"):
                decode(data, name)


@pytest.mark.parametrize("name", ["sensor_msgs/Image", "sensor_msgs/msg/Image"])
def test_given_a_name_in_either_form_when_completed_then_it_is_the_full_one(name):
    assert full_name(name) == "sensor_msgs/msg/Image"
    assert message_class(name) is message_class("sensor_msgs/msg/Image")
    assert has_header(name)


@pytest.mark.parametrize(
    "name", ["", "Image", "/Image", "sensor_msgs/", "sensor_msgs/srv/Image", "a/msg/b/c", "//"]
)
def test_given_a_name_of_another_form_when_asked_then_the_error_says_the_form(name):
    for ask in (full_name, message_class, has_header, warm_up):
        with pytest.raises(UnknownMessageType, match="package/msg/Name"):
            ask(name)


@pytest.mark.parametrize("ask", [message_class, has_header, warm_up, lambda name: decode(b"", name)])
def test_given_a_type_that_nobody_has_when_asked_then_the_error_names_the_package_to_install(ask):
    with pytest.raises(UnknownMessageType, match=r"nowhere_msgs/msg/Nothing.*install nowhere_msgs"):
        ask("nowhere_msgs/msg/Nothing")


def test_given_a_type_when_asked_then_only_a_header_in_front_counts():
    assert has_header("sensor_msgs/msg/Image")
    assert has_header("nav_msgs/msg/Path")
    for name in (
        "std_msgs/msg/Header",
        "std_msgs/msg/Float64",
        "std_msgs/msg/Empty",
        "tf2_msgs/msg/TFMessage",
    ):
        assert not has_header(name)  # a header is one itself: its first field is the stamp


def test_given_an_installed_package_when_its_type_is_asked_for_then_its_files_are_read(install):
    install(
        "radar_msgs",
        Scan="std_msgs/Header header\nReturn[] returns\nradar_msgs/Return[2] first\nuint8 NEAR=1\n",
        Return="float32 range  # m\nfloat32[3] direction\nstring<=8 label\nwstring note\n",
    )
    warm_up("radar_msgs/msg/Scan")
    assert has_header("radar_msgs/msg/Scan")
    direction = np.array([1, 2, 3], dtype=np.float32)
    own = {"direction": direction, "label": "car", "note": np.array([9633], np.uint16)}  # in UTF-16
    one, two, three = (
        empty_message("radar_msgs/msg/Return", range=metres, **own) for metres in (1.5, 2.5, 3.5)
    )
    head = header(4_000_000_002, "radar")
    scan = empty_message("radar_msgs/msg/Scan", header=head, returns=[one], first=[two, three])
    found = decode(encode(scan, "radar_msgs/msg/Scan"), "radar_msgs/msg/Scan")
    assert [item.range for item in (*found.returns, *found.first)] == [1.5, 2.5, 3.5]
    assert (found.returns[0].label, found.returns[0].note.tolist()) == ("car", [9633])
    assert found.header.stamp.sec == 4


@pytest.mark.parametrize(
    ("package", "name", "text", "said"),
    [
        ("half_msgs", "Whole", "absent_msgs/Part part\n", "absent_msgs/msg/Part"),
        ("broken_msgs", "Bad", "float32[ x\n", "broken_msgs/msg/Bad"),
    ],
)
def test_given_an_installed_type_of_a_missing_one_or_no_definition_when_asked_twice_then_both_say_which(
    install, package, name, text, said
):
    install(package, **{name: text})
    for _ in range(2):
        with pytest.raises(UnknownMessageType, match=said):
            message_class(f"{package}/msg/{name}")


def test_given_a_type_when_asked_for_its_fields_then_each_has_the_type_that_it_or_its_elements_are_of():
    assert field_types("nav_msgs/Path") == {
        "header": "std_msgs/msg/Header",
        "poses": "geometry_msgs/msg/PoseStamped",
    }
    assert field_types("std_msgs/msg/Float64MultiArray")["data"] == ""


@pytest.mark.parametrize("name", [*SOME, "visualization_msgs/msg/Marker", "sensor_msgs/msg/CameraInfo"])
def test_given_a_type_when_a_blank_message_is_made_then_it_survives_the_wire(name):
    data = bytes(encode(empty_message(name), name))
    assert bytes(encode(decode(data, name), name)) == data


def test_given_fields_when_a_blank_message_is_made_then_they_are_its_own():
    message = empty_message(
        "nav_msgs/msg/Odometry", header=header(1_000_000_007, "odom"), child_frame_id="base"
    )
    names = (message.header.frame_id, message.child_frame_id)
    assert (stamp_ns_of(message.header), *names) == (1_000_000_007, "odom", "base")
    assert message.twist.covariance.tolist() == [0.0] * 36
    with pytest.raises(TypeError, match="chidl"):
        empty_message("nav_msgs/msg/Odometry", chidl="x")


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("std_msgs/msg/Float32MultiArray", "data", np.arange(3, dtype=np.int32), " is int32 [3]"),
        ("std_msgs/msg/Float32MultiArray", "data", np.arange(3, dtype=">f4"), " is >f4 [3]"),
        ("std_msgs/msg/Float32MultiArray", "data", [1.0], " is [1.0] (list)"),
        ("sensor_msgs/msg/JointState", "position", np.arange(3), " is int64 [3]"),
        ("nav_msgs/msg/OccupancyGrid", "data", np.array([200], np.uint8), " is uint8 [1]"),
        ("sensor_msgs/msg/CameraInfo", "k", np.ones(8), " is float64 [8]"),
        ("geometry_msgs/msg/Point", "x", "3", " is '3' (str)"),
        ("sensor_msgs/msg/Image", "is_bigendian", 300, " is 300 (int)"),
        ("sensor_msgs/msg/Image", "encoding", None, " is None (NoneType)"),
        ("visualization_msgs/msg/Marker", "id", 1.5, " is 1.5 (float)"),
        ("visualization_msgs/msg/Marker", "id", float("nan"), " is nan (float)"),
        ("visualization_msgs/msg/Marker", "frame_locked", "no", " is 'no' (str)"),
        ("visualization_msgs/msg/Marker", "pose", header(1, "map"), " is std_msgs/msg/Header"),
        ("visualization_msgs/msg/Marker", "points", np.zeros((2, 3)), " is float64 [2, 3]"),
        ("sensor_msgs/msg/JointState", "name", "arm", " is 'arm' (str)"),
        ("bounded_msgs/msg/Bounded", "label", "longer than 8", " is 'longer than 8' (str)"),
        ("bounded_msgs/msg/Bounded", "values", np.zeros(4, np.float32), " is float32 [4]"),
        ("bounded_msgs/msg/Bounded", "names", ["a", "b", "c"], " is ['a', 'b', 'c'] (list)"),
        (
            "nav_msgs/msg/Odometry",
            "pose",
            empty_message("geometry_msgs/msg/PoseWithCovariance", covariance=np.arange(36)),
            ".covariance is int64 [36]",
        ),
        (
            "visualization_msgs/msg/Marker",
            "points",
            [empty_message("geometry_msgs/msg/Point", y=y) for y in (np.float32(1), "1")],
            "[1].y is '1' (str)",
        ),
    ],
)
def test_given_a_value_that_its_field_cannot_hold_when_encoded_then_the_error_names_both(
    install, name, field, value, says
):
    install("bounded_msgs", Bounded="string<=8 label\nfloat32[<=3] values\nstring[<=2] names\n")
    with pytest.raises(TypeError, match=re.escape(f"{name}.{field}{says}; it has to be")):
        encode(empty_message(name, **{field: value}), name)


def test_given_values_that_fields_can_hold_when_encoded_then_they_are_taken():
    grid, marker = "nav_msgs/msg/OccupancyGrid", "visualization_msgs/msg/Marker"
    cells = encode(empty_message(grid, data=np.array([100, 0], np.uint8)), grid)
    assert decode(cells, grid).data.tolist() == [100, 0]
    point = empty_message("geometry_msgs/msg/Point", x=np.float32(1))
    encode(empty_message(marker, id=np.int64(3), frame_locked=np.True_, points=(point,)), marker)
    numbers = np.array([np.nan, 1], np.float32).view(np.dtype(np.float32).newbyteorder("<"))
    encode(empty_message("std_msgs/msg/Float32MultiArray", data=numbers), "std_msgs/msg/Float32MultiArray")
