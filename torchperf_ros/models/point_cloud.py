"""The points of a `sensor_msgs/msg/PointCloud2` as an array, or the reason why there are none.

Motion over a sweep.

Pure numpy, no torch. The emergency lane reads clouds in its own way (`safety/sensor_points.py`): it works
on CDR bytes, needs neither intensity nor time, and may not wait for what this imports.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import empty_message, header, stamp_ns_of

Points = NDArray[np.float32]
CLOUD: Final = "sensor_msgs/msg/PointCloud2"
EVERYWHERE: Final = (-np.inf, np.inf, -np.inf, np.inf)

_FORMATS: Final = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    8: "f8",
}  # sensor_msgs/PointField
_FLOATS: Final = (7, 8)
_DOUBLE: Final = 8  # bytes
_INTENSITIES: Final = ("intensity", "reflectivity")
_TIMES: Final = ("t", "time", "timestamp", "time_stamp", "offset_time")
_RELATIVE_S, _ABSOLUTE_S = (
    10.0,
    1e12,
)  # float64 up to these are s from the stamp, s since the epoch; more are ns
_LONGEST_S: Final = 1.0  # from the stamp; more is another clock, no sweep


@dataclass(frozen=True)
class Cloud:
    """What a cloud shows.

    Attributes:
        points: [n, 4] float32: x, y, z in m in the cloud's axes, and intensity, 0 to 1; 0 where it has
            none.
        times_s: [n] float32: when each was measured, in s from the header's stamp; None: nothing usable
            says so.
        other_clock_s: how far the times are from the stamp where that is too far to be one sweep; else 0.
        empty: points that were left out: NaN or Inf, or x = y = z = 0, as drivers write where nothing came
            back.
        beyond: points that were left out because they are outside of the bounds.
        clipped: points that were left out because there were too many.
    """

    points: Points
    times_s: Points | None
    other_clock_s: float
    empty: int
    beyond: int
    clipped: int


def read_cloud(
    message: Any,  # noqa: ANN401 - rosbags' class
    most: int,
    intensity_max: float = 255.0,
    bounds: tuple[float, float, float, float] = EVERYWHERE,
) -> Cloud:
    """The points of a decoded `PointCloud2`, in their order; the message's bytes are read once, in place.

    Fields may have any order, gaps and byte order, rows any padding. x, y and z are float32 or float64;
    `intensity`, or else `reflectivity`, is any number. Times are a field `t`, `time`, `timestamp`,
    `time_stamp` or `offset_time`:

    - whole numbers are ns from the stamp: `t` of Ouster's driver, `time_stamp` of Nebula, `offset_time` of
        Livox;
    - float32 is s from the stamp, of either sign: `time` of Velodyne's driver;
    - float64 is s from the stamp, s since the epoch (`timestamp` of Hesai's and RoboSense's drivers), or ns
      since the epoch (`timestamp` of Livox' second driver), by its size.

    Other fields are not looked at. Of more than `most` points so many remain, evenly spread over the order:
    every k-th would leave whole rings out where points lie column by column.

    Args:
        message: the cloud.
        most: points that are wanted at most.
        intensity_max: the intensity that counts as 1; what is more does, too.
        bounds: least and most x, least and most y in m; others are left out before any are clipped.

    Raises:
        BadInput: the message contradicts itself; the text has the field, its value, and what would be
            right.
    """
    height, width, step, row_step = message.height, message.width, message.point_step, message.row_step
    if not height * width:
        return Cloud(np.empty((0, 4), np.float32), None, 0.0, 0, 0, 0)
    record, intensity, time = _record(message)
    if height > 1 and row_step < width * step:
        raise BadInput(f"cloud row_step is {row_step}; {width} points of {step} bytes take {width * step}")
    needed = (height - 1) * row_step + width * step
    if message.data.size < needed:
        raise BadInput(
            f"cloud data has {message.data.size} bytes; {height} x {width} points of {step} take {needed}"
        )
    found = np.ndarray((height, width), record, message.data, strides=(row_step, step))
    with np.errstate(over="ignore", invalid="ignore"):  # what float32 cannot hold is Inf, and left out
        x, y, z = (found[axis].astype(np.float32).reshape(-1) for axis in "xyz")
        if intensity:
            strength = found[intensity].astype(np.float32).reshape(-1)
            strength *= np.float32(1.0 / intensity_max)
            np.minimum(np.fmax(strength, 0.0, out=strength), 1.0, out=strength)  # NaN becomes 0
        else:
            strength = np.zeros(len(x), np.float32)
    returned = np.isfinite(x) & np.isfinite(y) & np.isfinite(z) & ((x != 0) | (y != 0) | (z != 0))
    least_x, most_x, least_y, most_y = bounds
    inside = returned
    if bounds != EVERYWHERE:
        inside = returned & (x >= least_x) & (x <= most_x) & (y >= least_y) & (y <= most_y)
    chosen, some = np.flatnonzero(inside), int(np.count_nonzero(returned))
    empty, beyond, clipped = len(x) - some, some - len(chosen), max(0, len(chosen) - most)
    if clipped:
        chosen = chosen[np.arange(most) * len(chosen) // most]
    times, every = found[time].reshape(-1) if time else None, len(chosen) == len(x)
    points = np.empty((len(chosen), 4), np.float32)
    for column, values in enumerate((x, y, z, strength)):
        points[:, column] = values if every else values[chosen]
    if times is not None and not every:
        times = times[chosen]
    times_s = None if times is None else _from_stamp(times, message.header)
    farthest_s = 0.0 if times_s is None else float(np.abs(times_s).max(initial=0.0))
    if farthest_s > _LONGEST_S:
        return Cloud(points, None, farthest_s, empty, beyond, clipped)
    return Cloud(points, times_s, 0.0, empty, beyond, clipped)


def _record(message: Any) -> tuple[np.dtype[np.void], str, str]:  # noqa: ANN401
    """How a point lies in the bytes, with the fields that are used.

    Names of those for intensity and time, or "".
    """
    fields = {field.name: field for field in message.fields}
    intensity, time = (
        next((name for name in names if name in fields), "") for names in (_INTENSITIES, _TIMES)
    )
    used = ["x", "y", "z", *filter(None, (intensity, time))]
    order = ">" if message.is_bigendian else "<"
    formats, offsets = [], []
    for name in used:
        if name not in fields:
            raise BadInput(
                f"cloud has no field {name}; it has {', '.join(fields) or 'none'}, and needs x, y and z"
            )
        field = fields[name]
        allowed = _FLOATS if name in "xyz" else tuple(_FORMATS)
        if field.datatype not in allowed:
            what = "7 (float32) or 8 (float64)" if name in "xyz" else "1 to 8, see sensor_msgs/PointField"
            raise BadInput(f"cloud field {name} has datatype {field.datatype}; it has to be {what}")
        if field.count > 1:  # some drivers leave it at 0
            raise BadInput(f"cloud field {name} has count {field.count}; it has to be 1")
        kind = np.dtype(order + _FORMATS[field.datatype])
        if (end := field.offset + kind.itemsize) > message.point_step:
            raise BadInput(f"cloud point_step is {message.point_step}; field {name} ends at {end} bytes")
        formats.append(kind)
        offsets.append(field.offset)
    layout = {"names": used, "formats": formats, "offsets": offsets, "itemsize": message.point_step}
    return np.dtype(layout), intensity, time  # type: ignore[call-overload]  # its stub wants a literal


def _from_stamp(times: NDArray[Any], header: Any) -> Points:  # noqa: ANN401
    """Times in s from the stamp.

    Float32 holds such a difference, not a time since the epoch. NaN is the stamp.
    """
    if times.dtype.kind in "iu":
        times = times * 1e-9
    elif (
        times.dtype.itemsize == _DOUBLE
        and (size := np.fmax.reduce(np.abs(times), initial=0.0)) > _RELATIVE_S
    ):
        stamp_ns = float(stamp_ns_of(header))
        times = times - stamp_ns / NS_PER_S if size <= _ABSOLUTE_S else (times - stamp_ns) * 1e-9
    times_s = times.astype(np.float32)
    times_s[np.isnan(times_s)] = 0.0
    return times_s


def at_stamp(points: Points, times_s: Points, speed: float, yaw_rate: float) -> Points:
    """Points where they would be if all of them had been measured at the stamp.

    The vehicle goes along an arc, at constant speed and yaw rate: at a time t it stands at the chord
    v t sin(a) / a in the direction a = w t / 2, turned by w t. Objects that move stay smeared.

    Args:
        points: [n, 4], see `Cloud`, in axes that move with the vehicle's reference point: x forward, y
            left.
        times_s: [n], when each was measured, in s from the stamp.
        speed: m/s along x.
        yaw_rate: rad/s, left positive.

    Returns:
        [n, 4], a new array.
    """
    half = times_s * np.float32(0.5 * yaw_rate)
    chord = times_s * np.float32(speed) * np.sinc(half * np.float32(1.0 / np.pi))
    sine, cosine, moved = np.sin(2.0 * half), np.cos(2.0 * half), points.copy()
    moved[:, 0] = points[:, 0] * cosine - points[:, 1] * sine + chord * np.cos(half)
    moved[:, 1] = points[:, 0] * sine + points[:, 1] * cosine + chord * np.sin(half)
    return moved


def cloud_message(points: NDArray[np.void], stamp_ns: int, frame_id: str) -> Any:  # noqa: ANN401
    """A `PointCloud2` of a structured array, whose fields are those of the cloud, in one row."""
    datatypes = {name: number for number, name in _FORMATS.items()}
    fields = [
        empty_message(
            "sensor_msgs/msg/PointField",
            name=name,
            offset=offset,
            datatype=datatypes[kind.str[1:]],
            count=1,
        )
        for name, (kind, offset, *_) in (points.dtype.fields or {}).items()
    ]
    return empty_message(
        CLOUD,
        header=header(stamp_ns, frame_id),
        height=1,
        width=len(points),
        fields=fields,
        is_dense=True,
        point_step=points.dtype.itemsize,
        row_step=points.nbytes,
        data=points.view(np.uint8),
    )
