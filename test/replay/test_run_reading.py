"""Pictures of what frames were computed from: encodings, neighbours, and recorded logs of real sensors."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_typestore

from test.observe.runs import report_logs as logs
from torchperf_ros.api.messages import encode, message_class
from torchperf_ros.observe.runs.run_log import RunLog, StageLog
from torchperf_ros.replay.run_reading import input_pictures
from torchperf_ros.stage.frame_table import FRAME

FIELD_LOGS = Path(__file__).parents[4] / "shared" / "fieldlogs"
STAMP_NS = logs.START_NS


def image_log(folder, encoding, channels, pixel, bigendian=0):
    """A log of one picture of 16 by 16 equal pixels, given as the bytes of one."""
    stamp = message_class("builtin_interfaces/msg/Time")(sec=STAMP_NS // 10**9, nanosec=0)
    header = message_class("std_msgs/msg/Header")(stamp=stamp, frame_id="camera")
    data = np.tile(np.array(pixel, dtype=np.uint8), 256)
    message = message_class(logs.IMAGE)(header, 16, 16, encoding, bigendian, 16 * channels, data)
    return logs.write_log(
        folder / "log", [("/image", logs.IMAGE, STAMP_NS, bytes(encode(message, logs.IMAGE)))]
    )


def pictures_of(log, stamp_ns=STAMP_NS, t_ns=STAMP_NS, side=100):
    """Of a frame with this stamp, answered at this time."""
    rows = np.zeros(1, FRAME)
    rows["stamp_ns"], rows["t_ns"] = stamp_ns, t_ns
    return input_pictures(
        RunLog("run", (StageLog("camera", (), rows),), recordings=(log,)), {"camera": [0]}, side
    )


def shown(picture):
    """The picture's pixel in the middle."""
    data = base64.b64decode(picture["picture"].removeprefix("data:image/jpeg;base64,"))
    decoded = Image.open(io.BytesIO(data))
    return decoded.getpixel((decoded.width // 2, decoded.height // 2))


@pytest.mark.parametrize(("off_ms", "found"), [(0, True), (40, True), (200, False)])
def test_given_a_frame_when_shown_then_its_image_or_a_near_one_is_and_says_how_far_off_it_is(
    tmp_path, off_ms, found
):
    wanted_ns = STAMP_NS - off_ms * 1_000_000
    log = image_log(tmp_path, "bgr8", 3, [50, 100, 200])
    pictures, why = pictures_of(log, wanted_ns)
    assert (("", wanted_ns) in pictures) is found
    assert ("within 100 ms" in why) is not found
    if found:
        assert pictures["", wanted_ns]["words"] == f"/image, stamp {off_ms:+.1f} ms from the frame's"
        assert pictures["", wanted_ns]["off"] == ("a neighbour, +40 ms off" if off_ms else "")
        assert shown(pictures["", wanted_ns]) == pytest.approx((200, 100, 50), abs=4)


@pytest.mark.parametrize(
    ("cameras", "said"), [(2, "trigger"), (1, "trigger"), (1, "output"), (0, "output")]
)
def test_given_a_stage_whose_output_is_an_image_when_reported_then_its_camera_is_shown(
    tmp_path, cameras, said
):
    """Records name the trigger and the output, a replay's run only the output."""
    topics = ["/mask", *["/rear", "/camera"][2 - cameras :]]
    told = [
        (topic, logs.IMAGE, logs.START_NS + seq * logs.PERIOD_NS + 1, logs.image(seq))
        for seq in range(logs.FRAMES)
        for topic in topics
    ]
    folder = tmp_path / "evidence"
    folder.mkdir()
    logs.write_log(folder / "box", sorted(told, key=lambda message: message[2]))
    lines = logs.records()
    for stage in lines[0]["stages"]:
        stage |= {"output": "/mask", **({"trigger": "/camera"} if said == "trigger" else {})}
    logs.write_records(folder / "records.jsonl", lines)
    (run,) = logs.read(folder)
    pictures, why = input_pictures(run, {stage.name: range(0, logs.FRAMES, 10) for stage in run.stages}, 50)
    seen = {picture["words"].partition(",")[0] for picture in pictures.values()}
    assert seen == ({"/camera"} if cameras else set())
    assert why.startswith("no images or point clouds in this log") is (not cameras)


def test_given_an_encoding_that_is_not_drawn_or_no_log_when_shown_then_it_is_named(tmp_path):
    pictures, why = pictures_of(image_log(tmp_path, "yuv422_yuy2", 2, [1, 2]))
    assert pictures == {}
    assert why.startswith("1 frames without a picture: image encoding 'yuv422_yuy2' is not supported")
    pictures, why = pictures_of(tmp_path / "none.mcap")
    assert pictures == {}
    assert why.endswith("none.mcap: does not exist")


@pytest.mark.parametrize(
    "name", ["highway_960x540_25hz", "tum_fr1_rpy_head60_sqlite3", "lidar/embag_test_luminar.bag"]
)
def test_given_a_log_of_a_real_sensor_when_shown_then_there_is_something_to_see(name):
    path = FIELD_LOGS / name
    if not path.exists():
        pytest.skip(f"no field log {path}")
    with AnyReader([path], default_typestore=get_typestore(Stores.ROS2_JAZZY)) as reader:
        wanted = [
            c
            for c in reader.connections
            if c.msgtype.rpartition("/")[2] in {"CompressedImage", "PointCloud2"}
        ]
        connection, t_ns, raw = next(reader.messages(wanted))
        stamp = reader.deserialize(raw, connection.msgtype).header.stamp
    stamp_ns = stamp.sec * 10**9 + stamp.nanosec
    pictures, why = pictures_of(path, stamp_ns, t_ns, 300)
    assert why == ""
    assert "stamp +0.0 ms" in pictures["", stamp_ns]["words"]
    data = base64.b64decode(pictures["", stamp_ns]["picture"].partition(",")[2])
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert max(pixels.shape) <= 300
    assert pixels.std() > 20
