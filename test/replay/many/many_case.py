"""Small logs for the replay of many, and parameters under which they take moments."""

import os
import time
from pathlib import Path

from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

STORE = get_typestore(Stores.ROS2_HUMBLE)
POINT = "geometry_msgs/msg/PointStamped"
START_NS = 1_700_000_000_000_000_000
PERIOD_NS = 20_000_000
FRAMES = 10
PARAMS = """\
perf:
  ros__parameters:
    stages: [tested]
    tested:
      adapter: many_adapter:Obedient
      options: '{{"folder": "{folder}"}}'
      output: same
      tiers: [full]
      engine: eager
      backup: none
"""


def write_log(path, orders="", frames=FRAMES):
    """A rosbag2 folder, or an `.mcap` file, of points that carry orders."""
    types = STORE.types
    folder = path if path.suffix != ".mcap" else path.with_name(f".{path.stem}")
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connection = writer.add_connection("/point", POINT, typestore=STORE)
        for number in range(frames):
            t_ns = START_NS + number * PERIOD_NS
            stamp = types["builtin_interfaces/msg/Time"](sec=t_ns // 10**9, nanosec=t_ns % 10**9)
            header = types["std_msgs/msg/Header"](stamp=stamp, frame_id=orders)
            point = types["geometry_msgs/msg/Point"](x=float(number), y=0.0, z=0.0)
            data = STORE.serialize_cdr(types[POINT](header=header, point=point), POINT)
            writer.write(connection, t_ns, data)
    if folder != path:
        next(folder.glob("*.mcap")).rename(path)
        (folder / "metadata.yaml").unlink()
        folder.rmdir()
    return path


def write_params(folder):
    """A parameter file for the stage whose workers note their processes in this folder."""
    path = folder / "params.yaml"
    path.write_text(PARAMS.format(folder=folder), encoding="utf-8")
    return path


def workers_alive(folder):
    """Processes of workers that noted themselves and have not ended."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    assert pids, "no worker has begun"
    return [pid for pid in pids if _alive(pid)]


def wait_until(condition, what, process=None, timeout_s=60.0):
    """Look every 20 ms, for events that nobody notifies of; only while the process lives that brings it about."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, f"{what}, and it said: {process.communicate()}"
        assert time.monotonic() < give_up_at, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def _alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def use_adapter(patch):
    """Let worker processes import what stands beside this file."""
    here = str(Path(__file__).parent)
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
