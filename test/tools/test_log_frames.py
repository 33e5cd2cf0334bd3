"""A log's frames as model inputs: which are taken, and what is refused."""

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import AdapterError, BadInput, TorchperfError
from torchperf_ros.api.messages import empty_message, encode
from torchperf_ros.engines.built_tier import read_frames
from torchperf_ros.tools.check import do_job, log_frames
from torchperf_ros.tools.demo.make_log import DriveLog, write_drive

from ..replay.logs.small_logs import mcap

CPU = torch.device("cpu")
IMAGE = "sensor_msgs/msg/Image"
EXAMPLE = (torch.zeros(1, 3, 24, 32),)


class Looks(Adapter):
    """Takes images; options: `refuses` every other one, `raises` at the fourth, `trigger`."""

    inputs = {"image": IMAGE, "odom": "nav_msgs/msg/Odometry"}
    output = IMAGE

    def __init__(self, options, device):
        self.options, self.observed, self.seen = options, 0, []
        if "trigger" in options:
            self.inputs = {"points": options["trigger"]}

    def build(self, tier):
        return torch.nn.Identity()

    def example_inputs(self, tier):
        return EXAMPLE

    def observe(self, messages):
        self.observed += 1

    def preprocess(self, messages):
        if self.options.get("raises") and self.observed > 3:
            raise ValueError("no")
        if self.options.get("refuses") and (self.options["refuses"] == "all" or self.observed % 2):
            raise BadInput("too dark")
        image = messages["image"].message
        return (
            torch.from_numpy(np.array(image.data).reshape(1, image.height, image.width, 3))
            .permute(0, 3, 1, 2)
            .float()
            / 255.0,
        )

    def postprocess(self, outputs, messages):
        return empty_message(IMAGE)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("drive") / "drive.mcap"
    write_drive(path, DriveLog(seconds=3.0, width=32, height=24))
    return path


def keep(log, folder, **options):
    said = []
    good = do_job(
        {
            **{"adapter": f"{__name__}:Looks", "options": options, "device": "cpu", "log": str(log)},
            "frames": str(folder / "frames.safetensors"),
        },
        lambda kind, **more: said.append((kind, more)),
    )
    return good, said[-1], read_frames(str(folder / "frames.safetensors"), EXAMPLE, CPU)


def test_given_a_drive_when_kept_then_frames_are_spread_over_it_as_the_adapter_makes_them(log, tmp_path):
    good, (kind, said), frames = keep(log, tmp_path)
    assert (good, kind, said["text"]) == (True, "frames", "64 of 90 frames of drive.mcap")
    whole = [Looks({}, CPU).preprocess(messages) for messages in log_frames(Looks({}, CPU), log)]
    assert len(whole) == 90
    numbers = [next(n for n, (image,) in enumerate(whole) if image.equal(frame)) for (frame,) in frames]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1] > 80) == (0, True)


def test_given_two_inputs_of_a_type_when_read_then_each_gets_its_own_topic_by_name_or_else_by_its_order(
    tmp_path,
):
    def frames(log_topics, *inputs):
        entries = [
            (topic, IMAGE, bytes(encode(empty_message(IMAGE, encoding=topic), IMAGE)), number)
            for number, topic in enumerate(log_topics)
        ]
        adapter = Looks({}, CPU)
        adapter.inputs = dict.fromkeys(inputs, IMAGE)
        return [
            {name: each.message.encoding for name, each in frame.items()}
            for frame in log_frames(adapter, mcap(tmp_path / "drive.mcap", entries))
        ]

    right_first = ["/car/right", "/car/left"]
    assert frames(right_first, "left", "right") == [{"left": "/car/left", "right": "/car/right"}]
    assert frames([*right_first, "/car/right"], "image") == [{"image": "/car/right"}] * 2
    assert frames(["/cam0"], "left", "right") == [{"left": "/cam0"}]
    with pytest.raises(TorchperfError, match=r"which is the trigger left; it has /right \("):
        frames(["/right"], "left", "right")


def test_given_frames_that_are_refused_when_kept_then_they_are_counted_and_the_others_are_kept(
    log, tmp_path
):
    _, (_, said), frames = keep(log, tmp_path, refuses="odd")
    assert said["text"].startswith(f"{len(frames)} of 90 frames of drive.mcap, ")
    assert said["text"].endswith(f"{64 - len(frames)} refused: too dark")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"refuses": "all"},
            TorchperfError,
            "none of its 90 frames can be used; the adapter refuses all 64: too dark",
        ),
        ({"raises": True}, AdapterError, r"raises on frame \d+ of .*: ValueError: no"),
        (
            {"trigger": "sensor_msgs/msg/PointCloud2"},
            TorchperfError,
            "has no sensor_msgs/msg/PointCloud2, which is the",
        ),
    ],
)
def test_given_a_log_without_usable_frames_when_kept_then_the_error_says_why(
    log, tmp_path, options, error, says
):
    with pytest.raises(error, match=says):
        keep(log, tmp_path, **options)
