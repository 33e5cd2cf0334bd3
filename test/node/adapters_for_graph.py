"""Adapters for the tests of the node in a real ROS graph.

Loaded by its workers, with this folder on PYTHONPATH.
"""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import message_class

POINT = "geometry_msgs/msg/PointStamped"


class Obedient(Adapter):
    """Image in, point out: x is the image's width. Misbehaves once for every order that it finds.

    Options:
        trigger: topic of the images; default "image".
        orders: folder in which a file's name is an order, for example `hang-40`: the first worker that
            preprocesses an image of this width removes the file and hangs. `sleep` takes 10 s; the others
            are `raise`, `bad`, `nan`. A file `doing` then says that it has begun, and which process it is.
    """

    output = POINT

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        self.inputs = {options.get("trigger", "image"): "sensor_msgs/msg/Image"}
        self._orders = Path(options["orders"]) if "orders" in options else None

    def build(self, tier: str) -> torch.nn.Module:
        return torch.nn.Identity().eval()

    def example_inputs(self, tier: str) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(1),)

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        (image,) = messages.values()
        width = float(image.message.width)
        for order in ("hang", "sleep", "raise", "bad", "nan"):
            if self._orders is not None and self._takes(f"{order}-{image.message.width}"):
                (self._orders / "doing").write_text(str(os.getpid()))
                width = self._obey(order)
        return (torch.tensor([width]),)

    def _takes(self, order: str) -> bool:
        try:
            (self._orders / order).unlink()
        except FileNotFoundError:
            return False
        return True

    def _obey(self, order: str) -> float:
        if order == "hang":
            time.sleep(3600.0)
        if order == "sleep":
            time.sleep(10.0)
        if order == "raise":
            raise RuntimeError("told to raise")
        if order == "bad":
            raise BadInput("told to find it bad")
        return math.nan

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:
        (image,) = messages.values()
        return message_class(POINT)(
            header=image.message.header,
            point=message_class("geometry_msgs/msg/Point")(x=outputs.item(), y=0.0, z=0.0),
        )


class ObedientPlanner(Obedient):
    """Image in, path out: two poses, the image's width apart."""

    output = "nav_msgs/msg/Path"

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:
        (image,) = messages.values()
        point, turn = (message_class(f"geometry_msgs/msg/{kind}") for kind in ("Point", "Quaternion"))
        pose, stamped = (message_class(f"geometry_msgs/msg/{kind}") for kind in ("Pose", "PoseStamped"))
        places = [point(x=x, y=0.0, z=0.0) for x in (0.0, outputs.item())]
        poses = [
            stamped(
                header=image.message.header,
                pose=pose(position=place, orientation=turn(x=0.0, y=0.0, z=0.0, w=1.0)),
            )
            for place in places
        ]
        return message_class(self.output)(header=image.message.header, poses=poses)


class Follower(ObedientPlanner):
    """Point in, path out: behind the stage that gives points."""

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        super().__init__(options, device)
        self.inputs = {"point": POINT}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([float(messages["point"].message.point.x)]),)


class Slow(Obedient):
    """A model that takes the time, in ms, that the option `ms` has."""

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        super().__init__(options, device)
        self._ms = options["ms"]

    def build(self, tier: str) -> torch.nn.Module:
        return Sleeper(float(self._ms)).eval()


class Sleeper(torch.nn.Module):
    """Gives back what it is given, later."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self._ms = ms

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(self._ms / 1e3)
        return value


class Unbuildable(Obedient):
    """Fails while its model is built, after it has described what it takes and gives."""

    def build(self, tier: str) -> torch.nn.Module:
        raise RuntimeError(f"no weights for {tier}")


class Silent(Obedient):
    """Never comes to say what it takes and gives."""

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        time.sleep(3600.0)


class FiveInputs(Obedient):
    """Takes five images, of which four together with the first do not fit the ring."""

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        super().__init__(options, device)
        self.inputs |= {f"image_{number}": "sensor_msgs/msg/Image" for number in range(1, 5)}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([float(len(messages))]),)

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:
        return super().postprocess(outputs, {"image": next(iter(messages.values()))})


class Shifted(Obedient):
    """Another version of it: x is half a metre more; an image of width 13 ends its worker."""

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        (width,) = super().preprocess(messages)
        if width.item() == 13:
            os._exit(3)
        return (width + 0.5,)


class Scored(Shifted):
    """The same, with a score."""

    def score_messages(self, output: Any, reference: Any) -> float:
        return 1.0 - abs(output.point.x - reference.point.x)
