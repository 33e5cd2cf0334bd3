import re
from pathlib import Path

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.messages import decode, empty_message, message_class
from torchperf_ros.worker.session import PostprocessError, contradiction, output_message
from torchperf_ros.worker.tier import InvalidOutput

IMAGE, CLOUD, GRID = "sensor_msgs/msg/Image", "sensor_msgs/msg/PointCloud2", "nav_msgs/msg/OccupancyGrid"
COMPRESSED, ARRAY = "sensor_msgs/msg/CompressedImage", "std_msgs/msg/Float32MultiArray"


def zeros(count, dtype=np.uint8):
    return np.zeros(count, dtype)


def layout(*sizes):
    dim = [message_class("std_msgs/msg/MultiArrayDimension")("a", size, size) for size in sizes]
    return message_class("std_msgs/msg/MultiArrayLayout")(dim, 0)


IMAGE_FIELDS = {"height": 2, "width": 3, "encoding": "mono8", "step": 3, "data": zeros(6)}
CLOUD_FIELDS = {"height": 1, "width": 2, "point_step": 12, "row_step": 24, "data": zeros(24)}


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        (IMAGE, IMAGE_FIELDS, ""),
        (IMAGE, IMAGE_FIELDS | {"step": 4, "data": zeros(8)}, ""),  # padded rows
        (IMAGE, IMAGE_FIELDS | {"encoding": "yuv422_yuy2"}, ""),
        (IMAGE, IMAGE_FIELDS | {"data": zeros(24)}, "data has 24 bytes; 2 rows of 3 bytes are 6"),
        (IMAGE, IMAGE_FIELDS | {"encoding": "rgb8"}, "step is 3; 3 pixels of rgb8 take 9"),
        (COMPRESSED, {"data": zeros(1)}, ""),
        (COMPRESSED, {}, "data is empty"),
        (CLOUD, CLOUD_FIELDS, ""),
        (CLOUD, CLOUD_FIELDS | {"width": 3}, "width 3 x point_step 12"),
        (CLOUD, CLOUD_FIELDS | {"data": zeros(23)}, "data has 23 bytes"),
        (GRID, {}, ""),
        (GRID, {"data": zeros(1, np.int8)}, "data has 1 cells; 0 rows of 0 are 0"),
        (ARRAY, {"layout": layout(2, 3), "data": zeros(6, np.float32)}, ""),
        (ARRAY, {"layout": layout(1, 1, 1), "data": zeros(2, np.float32)}, ""),  # labels
        (
            ARRAY,
            {"layout": layout(2, 3), "data": zeros(5, np.float32)},
            "data has 5 values; its dimensions make 6",
        ),
        ("std_msgs/msg/String", {"data": "text"}, ""),
    ],
)
def test_given_a_message_when_its_sizes_do_not_fit_then_it_is_said_which(kind, fields, why):
    found = contradiction(empty_message(kind, **fields), kind)
    assert why in found
    assert bool(found) == bool(why)


class Postprocessing(Adapter):
    inputs = {"image": IMAGE}
    output = "std_msgs/msg/String"

    def __init__(self, postprocess):
        self._postprocess = postprocess

    def postprocess(self, outputs, messages):
        return self._postprocess(outputs)

    build = example_inputs = preprocess = None


def text(value):
    return message_class("std_msgs/msg/String")(data=str(float(value)))


TENSOR = torch.zeros(1, 5)


@pytest.mark.parametrize(
    ("postprocess", "outputs", "raised", "got"),
    [
        (
            lambda o: text(o[0].max()),
            {"logits": TENSOR, "boxes": 1},
            "KeyError: 0",
            "a dict with keys 'logits', 'boxes'",
        ),
        (
            lambda o: text(o.max()),
            (TENSOR, None),
            "AttributeError: 'tuple'",
            "a tuple of 2: a tensor float32 1x5, a N",
        ),
        (lambda o: text(o[5]), TENSOR, "IndexError: ", "a tensor float32 1x5"),
    ],
)
def test_given_outputs_that_are_taken_for_something_else_then_the_error_has_the_line_and_what_the_model_returns(
    postprocess, outputs, raised, got
):
    line = postprocess.__code__.co_firstlineno
    with pytest.raises(PostprocessError) as caught:
        output_message(Postprocessing(postprocess), outputs, {}, "std_msgs/msg/String")
    said = str(caught.value)
    assert said.startswith(raised)
    assert f"(test_output_message.py:{line}); the model of build() returns {got}" in said
    assert said.endswith("; postprocess(outputs) got it whole")


def test_given_the_examples_of_the_docs_when_run_then_each_makes_the_message_of_its_models_outputs():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def postprocess" in block
    ]
    exec(code, space := {})
    boxes, scores = torch.zeros(1, 2, 4), torch.tensor([[0.25, 0.75]])
    outputs = {"OfTensor": scores, "OfTuple": (boxes, scores), "OfDict": {"boxes": boxes, "scores": scores}}
    for name, value in outputs.items():
        adapter = Postprocessing(lambda given, kind=space[name]: kind().postprocess(given, {}))
        assert decode(output_message(adapter, value, {}, ARRAY), ARRAY).data.tolist() == [0.25, 0.75]


def test_given_a_good_message_when_made_then_it_is_encoded_and_none_or_one_that_contradicts_itself_is_refused():
    def made(message, kind):
        return output_message(Postprocessing(lambda _: message), TENSOR, {}, kind)

    assert decode(made(text(2), "std_msgs/msg/String"), "std_msgs/msg/String").data == "2.0"
    assert made(b"as they are", "std_msgs/msg/String") == b"as they are"
    with pytest.raises(
        PostprocessError, match="postprocess gave None; it has to give a std_msgs/msg/String"
    ):
        made(None, "std_msgs/msg/String")
    with pytest.raises(
        PostprocessError,
        match=r"Image, which cannot be encoded .*Image.data is .*has to be uint8\[\], a contiguous",
    ):
        made(empty_message(IMAGE, **IMAGE_FIELDS | {"data": zeros((2, 3))}), IMAGE)
    with pytest.raises(
        InvalidOutput, match="the sensor_msgs/msg/Image contradicts itself: data has 24 bytes"
    ):
        made(empty_message(IMAGE, **IMAGE_FIELDS | {"data": zeros(24)}), IMAGE)
