"""A recorded log, played to the node as if it happened now.

`ros2 launch torchperf_ros replay.launch.py log:=drive`.
"""

import shlex
import sys
from pathlib import Path

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    IncludeLaunchDescription,
    OpaqueFunction,
    Shutdown,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

NODE = Path(__file__).resolve().with_name("perception.launch.py")


def generate_launch_description() -> LaunchDescription:
    """The node with the log's time, and the player, whose end ends everything.

    The arguments of `perception.launch.py` are arguments here as well: `image` and `odom` name topics of
    the log.
    """
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "log", description="A rosbag2 folder, an .mcap or .db3 file, or a ROS 1 .bag."
            ),
            DeclareLaunchArgument(
                "play",
                default_value="",
                description="More options of `torchperf play`, for example '--rate 0.5 --start 12'.",
            ),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(str(NODE)), launch_arguments={"use_sim_time": "true"}.items()
            ),
            OpaqueFunction(function=_play),
        ]
    )


def _play(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The player: it begins when the node can answer frames, and gives it the log's time."""
    log, options, namespace = (
        LaunchConfiguration(name).perform(context) for name in ("log", "play", "namespace")
    )
    node = "/".join(["", *filter(None, namespace.split("/")), "perf"])
    player = ExecuteProcess(
        cmd=[
            *(
                "setpriv",
                "--pdeathsig",
                "TERM",
            ),  # a launch that is terminated leaves its processes behind otherwise
            *(sys.executable, "-m", "torchperf_ros.tools", "play", log),
            *("--clock", "--wait-for-node", node),
            *shlex.split(options),
        ],
        name="player",
        output="screen",
        on_exit=Shutdown(reason="the player has ended"),
    )
    return [player]
