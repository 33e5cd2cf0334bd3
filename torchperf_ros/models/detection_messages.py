"""Detections as ROS messages: 3-D boxes for RViz and the planner, or 2-D boxes of an image."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from torchperf_ros.api.messages import empty_message, header, message_class
from torchperf_ros.models.networks import CLASSES

MARKER_ARRAY: Final = "visualization_msgs/msg/MarkerArray"
DETECTION_2D_ARRAY: Final = "vision_msgs/msg/Detection2DArray"

# boxes vanish from RViz when detections stop; as long as an output is held
_LIFETIME_NS: Final = 300_000_000
_FARTHEST_M: Final = 150.0


class Kind(NamedTuple):
    """What is usual for a class of objects.

    Height, length, and red, green and blue, 0..1, to show it in.
    """

    height_m: float
    length_m: float
    colour: tuple[float, float, float]


KINDS: Final = {
    "car": Kind(1.5, 4.5, (0.1, 0.6, 1.0)),
    "truck": Kind(3.2, 8.0, (1.0, 0.6, 0.1)),
    "cyclist": Kind(1.75, 1.8, (0.2, 0.9, 0.3)),
    "pedestrian": Kind(1.7, 0.5, (1.0, 0.2, 0.4)),
}


class Detection(NamedTuple):
    """One box in an image.

    Attributes:
        class_index: index into `CLASSES`.
        score: 0..1.
        x, y: box centre in pixels from the left and from the top.
        width, height: pixels, more than 0.
    """

    class_index: int
    score: float
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class ImageFrame:
    """What a message about an image needs to know of it.

    Attributes:
        stamp_ns: the image's stamp.
        frame_id: the camera's optical frame: x right, y down, z forward (REP 103).
        width, height: pixels.
    """

    stamp_ns: int
    frame_id: str
    width: int
    height: int


class Cube(NamedTuple):
    """One object in space.

    Attributes:
        class_index: index into `CLASSES`.
        score: 0..1.
        centre: x, y, z in m.
        size: m along x, y and z, before it is turned.
        yaw: rad around z.
    """

    class_index: int
    score: float
    centre: tuple[float, float, float]
    size: tuple[float, float, float]
    yaw: float = 0.0


class CubeMarkers:
    """Builds `visualization_msgs/msg/MarkerArray`: one CUBE per object after a DELETEALL.

    RViz keeps markers until they are replaced or expire; the DELETEALL makes an array replace the one
    before, also when it has fewer boxes or none. Namespace is the class, alpha the score.
    """

    def __init__(self) -> None:
        self._marker: Any = message_class("visualization_msgs/msg/Marker")
        names = (f"geometry_msgs/msg/{name}" for name in ("Pose", "Point", "Vector3", "Quaternion"))
        self._pose, self._point, self._vector, self._quaternion = map(message_class, names)
        self._colour: Any = message_class("std_msgs/msg/ColorRGBA")
        # The fields that no marker here varies, shared by all of them: a message is encoded, not edited.
        lifetime = empty_message("builtin_interfaces/msg/Duration", nanosec=_LIFETIME_NS)
        self._shared = vars(
            empty_message("visualization_msgs/msg/Marker", type=self._marker.CUBE, lifetime=lifetime)
        )

    def build(self, cubes: Iterable[Cube], stamp_ns: int, frame_id: str) -> object:
        """The marker array; its first marker clears the array before."""
        head = header(stamp_ns, frame_id)
        markers = [self._marker(**self._shared | {"header": head, "action": self._marker.DELETEALL})]
        for index, (class_index, score, (x, y, z), (length, width, height), yaw) in enumerate(cubes):
            name = CLASSES[class_index]
            red, green, blue = KINDS[name].colour
            turn = self._quaternion(x=0.0, y=0.0, z=math.sin(0.5 * yaw), w=math.cos(0.5 * yaw))
            own = {
                "header": head,
                "ns": name,
                "id": index,
                "pose": self._pose(position=self._point(x=x, y=y, z=z), orientation=turn),
                "scale": self._vector(x=length, y=width, z=height),
                "color": self._colour(r=red, g=green, b=blue, a=score),
            }
            markers.append(self._marker(**self._shared | own))
        array: object = message_class(MARKER_ARRAY)(markers=markers)
        return array


class MarkerArrays:
    """Markers of boxes in an image, in the camera's optical frame.

    A camera alone does not see distance: it follows from the usual height of the class by similar
    triangles, `z = focal_px * height_m / height_px`, for an ideal pinhole camera with square pixels.
    """

    def __init__(self, horizontal_fov_deg: float) -> None:
        self._focal_per_width = 0.5 / math.tan(math.radians(horizontal_fov_deg) / 2.0)
        self._markers = CubeMarkers()

    def build(self, detections: Sequence[Detection], frame: ImageFrame) -> object:
        """The marker array, see `CubeMarkers`."""
        cubes = (self._cube(detection, frame) for detection in detections)
        return self._markers.build(cubes, frame.stamp_ns, frame.frame_id)

    def box_m(
        self, detection: Detection, width: int, height: int
    ) -> tuple[float, float, float, float, float, float]:
        """Centre and size in m along the camera's axes, in an image of so many pixels."""
        kind, focal_px = KINDS[CLASSES[detection.class_index]], self._focal_per_width * width
        distance_m = min(focal_px * kind.height_m / detection.height, _FARTHEST_M)
        m_per_px = distance_m / focal_px
        x, y = (detection.x - width / 2.0) * m_per_px, (detection.y - height / 2.0) * m_per_px
        centre = x, y, distance_m + kind.length_m / 2.0
        return *centre, detection.width * m_per_px, detection.height * m_per_px, kind.length_m

    def _cube(self, detection: Detection, frame: ImageFrame) -> Cube:
        x, y, z, *size = self.box_m(detection, frame.width, frame.height)
        return Cube(detection.class_index, detection.score, (x, y, z), (size[0], size[1], size[2]))


def detection_2d_array(detections: Sequence[Detection], frame: ImageFrame) -> object:
    """A `vision_msgs/msg/Detection2DArray` in pixels.

    An `UnknownMessageType` where vision_msgs is not installed.
    """
    head, no_pose = (
        header(frame.stamp_ns, frame.frame_id),
        empty_message("geometry_msgs/msg/PoseWithCovariance"),
    )

    def made(name: str, **fields: object) -> object:
        message: object = message_class(f"vision_msgs/msg/{name}")(**fields)
        return message

    found = []
    for one in detections:
        hypothesis = made("ObjectHypothesis", class_id=CLASSES[one.class_index], score=one.score)
        result = made("ObjectHypothesisWithPose", hypothesis=hypothesis, pose=no_pose)
        centre = made("Pose2D", position=made("Point2D", x=one.x, y=one.y), theta=0.0)
        box = made("BoundingBox2D", center=centre, size_x=one.width, size_y=one.height)
        found.append(made("Detection2D", header=head, results=[result], bbox=box, id=""))
    return made("Detection2DArray", header=head, detections=found)


def boxes(message: Any) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401 - one of the two types
    """Left, top, right, bottom [n, 4] and class [n], by name, of a message of one of the types above.

    A box without a result has the class "". Markers have no box in the image; theirs is across the camera's
    view, divided by the distance of the centre. One that is not before the camera, or not finite, is empty:
    it overlaps none.
    """
    names, values = list[str](), list[tuple[float, ...]]()
    if hasattr(message, "detections"):
        for one in message.detections:
            names.append(one.results[0].hypothesis.class_id if one.results else "")
            values.append(
                (one.bbox.center.position.x, one.bbox.center.position.y, one.bbox.size_x, one.bbox.size_y)
            )
    else:
        for one in message.markers:
            if (one.type, one.action) == (one.CUBE, one.ADD):
                at, size = one.pose.position, one.scale
                names.append(one.ns)
                values.append(
                    tuple(side / at.z if at.z > 0 else math.nan for side in (at.x, at.y, size.x, size.y))
                )
    found = np.array(values, np.float64).reshape(-1, 4)
    found[~np.isfinite(found).all(axis=1)] = 0.0
    centre, half = found[:, :2], found[:, 2:] / 2
    return np.concatenate((centre - half, centre + half), axis=1), np.array(names, np.str_)
