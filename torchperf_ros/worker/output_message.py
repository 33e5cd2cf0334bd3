"""From a model's outputs to the bytes of the message that answers a frame, and what can be wrong."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import AdapterError
from torchperf_ros.api.messages import encode
from torchperf_ros.engines.outputs import described
from torchperf_ros.worker.reports import place_of
from torchperf_ros.worker.tier import InvalidOutput

_BYTES_PER_PIXEL: Final = {
    "mono8": 1,
    "8UC1": 1,
    "mono16": 2,
    "16UC1": 2,
    "rgb8": 3,
    "bgr8": 3,
    "8UC3": 3,
    "rgba8": 4,
    "bgra8": 4,
    "32FC1": 4,
}
_MISTAKES: Final = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)  # what a wrong idea of `outputs` raises


class PostprocessError(AdapterError):
    """`postprocess` failed; the message has the line, and what the model returned."""


def output_message(
    adapter: Adapter,
    outputs: Any,  # noqa: ANN401
    messages: Mapping[str, Received],
    kind: str,
) -> memoryview:
    """What `postprocess` makes of a model's outputs, as CDR bytes of the message type `kind`.

    Bytes are taken as they are.

    Raises:
        PostprocessError: it raised what comes of taking the outputs for something else; or it gave no such
            message.
        InvalidOutput: the message contradicts itself.
        Exception: what else it raises.
    """
    try:
        message = adapter.postprocess(outputs, messages)
    except _MISTAKES as error:
        reported, got = f"{type(error).__name__}: {error}{place_of(error, adapter)}", described(outputs)
        hint = f"the model of build() returns {got}; postprocess(outputs) got it whole"
        raise PostprocessError(f"{reported}; {hint}") from error
    if isinstance(message, bytes):
        return memoryview(message)
    if message is None:
        raise PostprocessError(f"postprocess gave None; it has to give a {kind}")
    try:
        data = encode(message, kind)
    except Exception as error:  # wrong fields may lead the encoder to any
        reported = (
            f"{described(message)}, which cannot be encoded as {kind} ({type(error).__name__}: {error})"
        )
        hint = "lists of numbers have to be numpy arrays of one dimension, of the field's type"
        raise PostprocessError(f"postprocess gave {reported}; {hint}") from error
    if why := contradiction(message, kind):
        raise InvalidOutput(f"the {kind} contradicts itself: {why}")
    return data


def check_inputs(given: Any) -> None:  # noqa: ANN401 - what a user's method gives
    """Pass a tuple of tensors.

    Raises:
        AdapterError: `preprocess` gave something else; a tensor would be taken apart along its first
            dimension.
    """
    if isinstance(given, torch.Tensor):
        raise AdapterError(
            f"preprocess gave {described(given)} alone; it has to give a tuple of tensors: (tensor,)"
        )
    if not isinstance(given, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in given):
        raise AdapterError(f"preprocess gave {described(given)}; it has to give a tuple of tensors")


# a message of rosbags, whose arrays are numpy's
def contradiction(message: Any, kind: str) -> str:  # noqa: ANN401
    """What in a message contradicts itself, "" if nothing.

    Sizes of images, clouds, grids and arrays; 0.1 to 0.8 us.
    """
    why = ""
    if kind == "sensor_msgs/msg/Image":
        found, height, step = message.data.size, message.height, message.step
        least = message.width * _BYTES_PER_PIXEL.get(message.encoding, 0)
        if step < least:
            why = f"step is {step}; {message.width} pixels of {message.encoding} take {least}"
        elif found != height * step:
            why = f"data has {found} bytes; {height} rows of {step} bytes are {height * step}"
    elif kind == "sensor_msgs/msg/CompressedImage":
        why = "" if message.data.size else "data is empty"
    elif kind == "sensor_msgs/msg/PointCloud2":
        found, height, step = message.data.size, message.height, message.row_step
        if found != height * step or step < message.width * message.point_step:
            why = (
                f"data has {found} bytes; height {height} x row_step {step} is {height * step},"
                f" width {message.width} x point_step {message.point_step}"
            )
    elif kind == "nav_msgs/msg/OccupancyGrid":
        found, height, width = message.data.size, message.info.height, message.info.width
        why = (
            ""
            if found == height * width
            else f"data has {found} cells; {height} rows of {width} are {height * width}"
        )
    elif kind.endswith("MultiArray") and message.layout.dim:
        found, sizes = len(message.data), [dim.size for dim in message.layout.dim]
        reported = message.layout.data_offset + math.prod(sizes)
        labelled = set(sizes) == {1}  # one entry for each label, as in this package
        why = (
            ""
            if labelled or found >= reported
            else f"data has {found} values; its dimensions make {reported}"
        )
    return why
