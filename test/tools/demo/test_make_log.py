"""The synthetic drive: what is in it, what goes wrong in it, and how it is written."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from torchperf_ros.api.messages import decode, stamp_ns_of
from torchperf_ros.models.road_scene import SPEED_MPS
from torchperf_ros.replay.logs.log_reader import LogFindings, LogReader
from torchperf_ros.tools.demo.make_log import (
    FAULTS,
    OBJECTS_TOPIC,
    START_NS,
    DriveLog,
    LogFault,
    MakeLogError,
    write_drive,
)
from torchperf_ros.tools.main import app

ROOT = Path(__file__).resolve().parents[3]
SMALL = DriveLog(seconds=1.0, width=64, height=36)
MS = 1_000_000


def images(drive):
    return [m for m in drive.messages() if m.topic == drive.image_topics[0]]


def stamps_ns(drive):
    return [stamp_ns_of(decode(m.data, m.type_name).header) for m in images(drive)]


def pixels(message):
    image = decode(message.data, message.type_name)
    return image.data.reshape(image.height, image.width, 3)


@pytest.mark.parametrize("name", ["log", "log.mcap", "log.db3", "log.bag"])
def test_given_a_drive_when_written_then_the_reader_gives_back_each_message_and_finds_nothing_wrong(
    tmp_path, name
):
    path = write_drive(tmp_path / name, SMALL)
    expected = [m for m in SMALL.messages() if m.topic != OBJECTS_TOPIC or name != "log.bag"]
    said = []
    with LogReader(path, said.append) as log:
        assert list(log.messages()) == expected
        assert (said, log.findings) == ([], LogFindings())
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["log.mcap", "log.db3", "log.bag"])
def test_given_the_same_arguments_when_written_then_the_bytes_are_the_same_and_other_seeds_give_others(
    tmp_path, name
):
    drive = replace(SMALL, seconds=0.5, jitter_ms=3.0, drop=0.1, compressed=True)
    contents = []
    for number, seed in enumerate((1, 1, 2)):
        (tmp_path / str(number)).mkdir()
        path = write_drive(tmp_path / str(number) / name, replace(drive, seed=seed))
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_given_a_drive_when_read_then_images_objects_and_odometry_belong_together():
    messages = list(SMALL.messages())
    assert {topic: sum(m.topic == topic for m in messages) for topic in {m.topic for m in messages}} == {
        "/camera/image_raw": 30,
        "/odom": 30,
        OBJECTS_TOPIC: 30,
    }
    assert [m.t_ns for m in messages] == sorted(m.t_ns for m in messages)
    assert stamps_ns(SMALL) == [START_NS + round(number / 30 * 1e9) for number in range(30)]
    last = decode(next(m for m in reversed(messages) if m.topic == "/odom").data, "nav_msgs/msg/Odometry")
    assert last.pose.pose.position.x == pytest.approx(SPEED_MPS * 29 / 30)
    assert (last.twist.twist.linear.x, last.pose.pose.orientation.w) == (SPEED_MPS, 1)
    assert (last.header.frame_id, last.child_frame_id) == ("odom", "base_link")


def test_given_the_labels_when_drawn_over_the_image_then_each_near_car_has_its_paint_in_its_box():
    drive = DriveLog(seconds=0.04, width=640, height=360)
    messages = {m.topic: m for m in drive.messages()}
    image = pixels(messages[drive.image_topics[0]])
    markers = decode(messages[OBJECTS_TOPIC].data, messages[OBJECTS_TOPIC].type_name).markers
    assert {(marker.ns, marker.text, marker.header.frame_id) for marker in markers} == {
        ("car", "car", "base_link")
    }
    near = [marker for marker in markers if marker.pose.position.x < 60]
    assert len(near) >= 2
    for marker in near:
        (left, top), (right, bottom) = ((round(corner.x), round(corner.y)) for corner in marker.points)
        paint = np.array([marker.color.r, marker.color.g, marker.color.b]) * 255
        is_paint = np.abs(image.astype(float) - paint).max(axis=-1) < 2
        rows, columns = np.nonzero(is_paint[top - 2 : bottom + 2, left - 2 : right + 2])
        assert rows.size > 0.15 * (bottom - top) * (right - left)
        assert np.ptp(columns) + 1 == pytest.approx(right - left, abs=0.12 * (right - left) + 1)


def test_given_compressed_images_when_decoded_then_they_show_the_same_scene():
    drive = replace(SMALL, seconds=0.1, width=320, height=180)
    (raw, *_), (packed, *_) = images(drive), images(replace(drive, compressed=True))
    message = decode(packed.data, "sensor_msgs/msg/CompressedImage")
    seen = np.asarray(Image.open(io.BytesIO(message.data.tobytes()))).astype(float)
    assert np.abs(seen - pixels(raw)).mean() < 4


def test_given_jitter_when_read_then_receipts_spread_and_stay_in_order_and_stamps_are_even():
    drive = replace(SMALL, seconds=5.0, width=8, height=8, jitter_ms=2.0)
    messages = images(drive)
    late_ms = (np.array([m.t_ns for m in messages]) - np.array(stamps_ns(drive))) / MS
    assert late_ms.mean() == pytest.approx(5.0, abs=0.3)
    assert late_ms.std() == pytest.approx(2.0, abs=0.3)
    times = [m.t_ns for m in drive.messages()]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", FAULTS)
def test_given_a_fault_when_read_then_it_is_there_for_as_long_as_it_should_be_and_only_then(kind):
    drive = replace(SMALL, faults=(LogFault(kind, 0.3, 0.2),))
    sound = dict(zip(stamps_ns(SMALL), images(SMALL), strict=True))
    found = [m for m in images(drive) if sound[m.t_ns - 5 * MS] != m]
    if kind == "gap":
        times = [m.t_ns for m in drive.messages()]
        assert max(b - a for a, b in pairwise(times)) == pytest.approx(233 * MS, abs=MS)
        assert len(images(drive)) == 24
        return
    assert len(found) == (
        5 if kind in {"frozen", "repeat-stamp"} else 6
    )  # of these two the first is as it should be
    assert all(START_NS + 300 * MS <= m.t_ns - 5 * MS < START_NS + 500 * MS for m in found)
    if kind == "truncated":
        assert {len(m.data) * 2 // 10 for m in found} == {len(images(SMALL)[0].data) // 10}
        return
    first = decode(found[0].data, found[0].type_name)
    stamp_ns = stamp_ns_of(first.header)
    off_ns = stamp_ns - (found[0].t_ns - 5 * MS)
    if kind == "zero-stamp":
        assert stamp_ns == 0
    else:
        moved = {"backward-stamp": -1000 * MS, "jump-stamp": 3_600_000 * MS}.get(kind, 0)
        assert off_ns == pytest.approx(moved if kind != "repeat-stamp" else -33 * MS, abs=MS)
    assert (first.width, first.height) == ((32, 18) if kind == "other-size" else (64, 36))
    if kind == "black":
        assert not any(pixels(m).any() for m in found)
    if kind == "frozen":
        assert all(np.array_equal(pixels(m), pixels(found[0])) for m in found)


def test_given_something_that_is_there_when_written_then_it_stays_unless_it_is_a_log_and_forced(tmp_path):
    (tmp_path / "drive").mkdir()
    path = write_drive(tmp_path / "drive" / "log", replace(SMALL, seconds=0.1))
    before = (path / "log.mcap").read_bytes()
    with pytest.raises(MakeLogError, match="exists; --force replaces it"):
        write_drive(path, replace(SMALL, seconds=0.2))
    assert (path / "log.mcap").read_bytes() == before
    write_drive(path, replace(SMALL, seconds=0.2), force=True)
    assert (path / "log.mcap").stat().st_size > len(before)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(MakeLogError, match="no folder of a rosbag2"):
        write_drive(tmp_path, SMALL, force=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["log.txt"], "a log is called .mcap, .db3, .bag, or has no suffix as a rosbag2 folder"),
        (["..", "--force"], "has to be the name of a log, such as drive.mcap, in a folder that is there"),
        (["nowhere/log"], "in a folder that is there"),
        (["/dev/null", "--force"], "is no file, and no folder of a rosbag2; it is not replaced"),
        (["x" * 300], "cannot be written: File name too long"),
        (["log", "--size", "7x100"], "'7x100' has to be like 1280x720, from 8x8 to 8192x8192"),
        *(
            (["log", "--fault", text], "has to be like gap@3 or gap@3:0.5")
            for text in ("", "gap@x", "gap@-1", "gap@1:0")
        ),
        (["log", "--fault", "fire@1"], "there are: gap"),
        (
            ["log", "--seconds", "2", "--fault", "gap@2"],
            "fault gap@2 begins after the end of the drive, at 2 s",
        ),
        (["log.bag", "--fault", "truncated@0"], "cannot be written to a ROS 1 bag"),
        (["log", "--seconds", "1e9"], "MB are free"),
    ],
)
def test_given_arguments_that_cannot_be_met_when_run_then_one_line_says_so_and_nothing_is_written(
    tmp_path, monkeypatch, arguments, says
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["make-log", *arguments])
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_given_the_command_when_run_then_it_says_what_it_wrote(tmp_path):
    path = tmp_path / "drive.mcap"
    result = CliRunner().invoke(app, ["make-log", str(path), "--seconds", "0.2", "--size", "64x36"])
    assert (result.exit_code, result.stdout) == (0, f"wrote {path}, 0.1 MB\n")


@pytest.mark.parametrize("name", ["log", "log.db3"])
def test_given_a_disk_that_is_full_when_written_then_one_line_says_so_and_nothing_is_left(
    tmp_path, name, limited
):
    with limited("FSIZE", 20_000), pytest.raises(MakeLogError) as error:
        write_drive(tmp_path / name, SMALL)
    assert str(error.value).startswith(f"{tmp_path / name}: cannot be written: ")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_given_an_interrupt_when_writing_then_nothing_is_left_under_any_name(tmp_path):
    path = tmp_path / "drive.mcap"
    long = ["--seconds", "2000", "--size", "64x36"]
    command = [sys.executable, "-m", "torchperf_ros.tools", "make-log", str(path), *long]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        while not any(tmp_path.rglob("*.mcap/*")) and not any(tmp_path.rglob(".drive*/*")):
            assert running.poll() is None, running.communicate()
        os.kill(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=200)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, said
    assert said.endswith("torchperf: stopped by SIGINT; nothing was written\n")
    assert list(tmp_path.iterdir()) == []
