"""Messages to compare, each written in one line.

Results of replays that never were, whose stages published them.
"""

import io
import math

import numpy as np
from PIL import Image

from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.replay.replay import ReplayResult, StageResult
from torchperf_ros.replay.replay_record import OutputLog
from torchperf_ros.stage.frame_table import FRAME, output_hash

MARKERS, PATH, ARRAY, IMAGE, COMPRESSED, POSE_2D = (
    "visualization_msgs/msg/MarkerArray",
    "nav_msgs/msg/Path",
    "std_msgs/msg/Float64MultiArray",
    "sensor_msgs/msg/Image",
    "sensor_msgs/msg/CompressedImage",
    "geometry_msgs/msg/Pose2D",
)


def point(x, y=0.0, z=0.0):
    return empty_message("geometry_msgs/msg/Point", x=x, y=y, z=z)


def pose(x=0.0, y=0.0, z=0.0, turn=(0.0, 0.0, 0.0, 1.0)):
    orientation = empty_message("geometry_msgs/msg/Quaternion", **dict(zip("xyzw", turn, strict=True)))
    return empty_message("geometry_msgs/msg/Pose", position=point(x, y, z), orientation=orientation)


def marker(x=0.0, y=0.0, *, number=0, kind=1, action=0, lifetime_s=0, score=1.0, stamp_ns=0):
    return empty_message(
        "visualization_msgs/msg/Marker",
        header=header(stamp_ns, "map"),
        ns="car",
        id=number,
        type=kind,
        action=action,
        pose=pose(x, y),
        color=empty_message("std_msgs/msg/ColorRGBA", b=1.0, a=score),
        lifetime=empty_message("builtin_interfaces/msg/Duration", sec=lifetime_s),
    )


def markers(*items):
    return empty_message(MARKERS, markers=list(items))


def path(*poses, stamp_ns=0):
    head = header(stamp_ns, "map")
    stamped = [empty_message("geometry_msgs/msg/PoseStamped", header=head, pose=item) for item in poses]
    return empty_message(PATH, header=head, poses=stamped)


def array(*values, label="a"):
    size = len(values)
    dimension = empty_message("std_msgs/msg/MultiArrayDimension", label=label, size=size, stride=size)
    layout = empty_message("std_msgs/msg/MultiArrayLayout", dim=[dimension])
    return empty_message(ARRAY, layout=layout, data=np.array(values, np.float64))


def image(*data, width=0, encoding="mono8"):
    """One row, of so many pixels, else of a byte each."""
    step = len(data)
    data = np.array(data, np.uint8)
    return empty_message(IMAGE, height=1, width=width or step, encoding=encoding, step=step, data=data)


def jpeg(grey, size):
    file = io.BytesIO()
    Image.new("L", size, grey).save(file, "JPEG")
    return empty_message(COMPRESSED, format="jpeg", data=np.frombuffer(file.getvalue(), np.uint8))


START_NS = 1_760_000_000_000_000_000
PERIOD_NS = 100_000_000


def stamp_ns(seq):
    return START_NS + seq * PERIOD_NS


def frame_row(seq, data, *, outcome=Outcome.ON_TIME, total_ms=10.0):
    row = np.zeros(1, FRAME)
    for name in FRAME.names:
        if FRAME[name].kind == "f":
            row[name] = math.nan
    row["seq"], row["stamp_ns"], row["t_ns"] = seq, stamp_ns(seq), stamp_ns(seq) + 3_000_000
    row["outcome"], row["total_ms"], row["output_hash"] = outcome, total_ms, output_hash(data)
    row["check"] = -1
    row["fallback"] = -1 if outcome is Outcome.ON_TIME else Fallback.HOLD_LAST
    return row


def stage_result(name, kind, rows, output=None, reasons=()):
    frames = np.concatenate([np.zeros(0, FRAME), *rows])
    return StageResult(
        name,
        ("full", "fast"),
        f"/{name}",
        kind,
        50.0,
        frames,
        len(rows),
        0,
        0,
        (),
        dict(reasons),
        output,
        {},
    )


def result_of(folder, stages, **summary):
    """A result whose stages published these messages.

    {"perception": [message, None for a frame without, ...]}.
    """
    output = OutputLog(folder / "outputs.mcap")
    results = {}
    for name, messages in stages.items():
        rows, kind = [], "std_msgs/msg/Float64MultiArray"
        for seq, message in enumerate(messages):
            data = None
            if message is not None:
                kind = message.__msgtype__
                data = bytes(encode(message, kind))
                output.write(f"/{name}", kind, data, stamp_ns(seq) + 3_000_000)
            rows.append(frame_row(seq, data))
        results[name] = stage_result(name, kind, rows, output.path)
    output.close()
    told = {
        "log": {"sha256": "a log"},
        "params_sha256": "parameters",
        "model": dict.fromkeys(stages, "a model"),
        "pace": "fast",
        "seed": 0,
    }
    return ReplayResult(folder / "drive.mcap", results, (), {**told, **summary}, output.path)
