"""The perception and planning node, which configures and activates itself.

`ros2 launch torchperf_ros perception.launch.py`.
"""

import difflib
import re
import shlex
import sys
from pathlib import Path

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode

from torchperf_ros.node.middleware import image_transport

FILE, PLAYED = "perception.launch.py", "replay.launch.py"
REMAP = re.compile(r"(?:\w+:)?[~/\w{}]+:=[~/\w{}]+")
OF_LAUNCH = ("launch-prefix", "launch-prefix-filter")
NEAR = 0.8  # of difflib: one or two letters differ
END_WITH_LAUNCH = (  # a launch that is terminated leaves its processes behind otherwise
    "setpriv --pdeathsig TERM "
)
# The recorder alone has 10 s to write an incident. Launch by itself kills a node 10 s after SIGTERM.
ENDS_WITHIN_S = "30"
TOPICS = {
    "image": "Camera images, sensor_msgs/msg/Image: the frames that perception answers by their deadline.",
    "odom": "The vehicle's motion, nav_msgs/msg/Odometry: planning's second input.",
    "detections": "Perception's output and planning's trigger, one message for every frame.",
    "trajectory": "Planning's output, nav_msgs/msg/Path, one message for every frame.",
}


def arguments() -> list[DeclareLaunchArgument]:
    """The arguments of this file."""
    found = [
        DeclareLaunchArgument(name, default_value=name, description=text) for name, text in TOPICS.items()
    ]
    every = Path(__file__).resolve().parents[1] / "config" / "perception.yaml"
    return [
        *found,
        DeclareLaunchArgument(
            "remap",
            default_value="",
            description=(
                "Remappings of any topic of any stage, such as 'camera_info:=/camera/info points:=/lidar'."
            ),
        ),
        DeclareLaunchArgument(
            "params_file",
            default_value="",
            description=f"Parameters of the node; empty: the reference models run. All are in {every}.",
        ),
        DeclareLaunchArgument(
            "device", default_value="", description="auto, cpu, cuda or cuda:N; empty: as params_file says."
        ),
        DeclareLaunchArgument(
            "use_sim_time",
            default_value="",
            choices=["", "true", "false"],
            description=(
                "Take the time from /clock, as for a replayed bag or a simulator; empty: as params_file"
                " says."
            ),
        ),
        DeclareLaunchArgument(
            "namespace", default_value="", description="Namespace of the node and its topics."
        ),
        DeclareLaunchArgument(
            "log_level",
            default_value="info",
            description="debug, info, warn, error or fatal, of the node's log.",
        ),
    ]


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; the node itself is made when their values are known."""
    return LaunchDescription([*arguments(), OpaqueFunction(function=_start)])


def _check_names(context: LaunchContext) -> None:
    """See that no argument is misspelt.

    Launch takes any name, and the default would stay in force without a word.

    A launch file that includes this one has arguments of its own, which are seen here, too.
    """
    launched = {Path(word).name for word in sys.argv}
    known = [argument.name for argument in arguments()] + ["log", "play"] * (PLAYED in launched)
    typed = {name for name, is_set, _ in (word.partition(":=") for word in context.argv) if is_set}
    for name in (context.launch_configurations.keys() | typed) - {*known, *OF_LAUNCH}:
        close = difflib.get_close_matches(name, known, 1, NEAR)
        if close or (name in typed and launched & {FILE, PLAYED}):
            hint = (
                f"{close[0]} is"
                if close
                else f"there are {', '.join(known)}; topics of your own stages go into remap"
            )
            raise RuntimeError(f"argument {name} is not there; {hint}")


def _remappings(text: str) -> list[tuple[str, str]]:
    """The pairs of the argument `remap`."""
    pairs = shlex.split(text)
    for pair in pairs:
        if not REMAP.fullmatch(pair):
            raise RuntimeError(
                f"remap: {pair!r} is not FROM:=TO, as in remap:='camera_info:=/camera/info points:=/lidar'"
            )
    return [(before, after) for before, _, after in (pair.partition(":=") for pair in pairs)]


def _start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The node, and the transport of its images."""
    _check_names(context)
    params_file = LaunchConfiguration("params_file").perform(context)
    if params_file and not Path(params_file).is_file():
        raise RuntimeError(f"params_file {params_file} is not there: no such file, seen from {Path.cwd()}")
    # The node makes its transitions itself. A launch that made them would wait for the services of a node
    # that has ended, as one with a wrong parameter does, and so would not end itself.
    overrides: dict[str, str | bool] = {"autostart": True}
    if device := LaunchConfiguration("device").perform(context):
        overrides["device"] = device
    if use_sim_time := LaunchConfiguration("use_sim_time").perform(context):
        overrides["use_sim_time"] = use_sim_time == "true"

    node = LifecycleNode(
        package="torchperf_ros",
        executable="torchperf_node",
        exec_name="torchperf_node",
        name="perf",
        namespace=LaunchConfiguration("namespace"),
        parameters=[*filter(None, [params_file]), overrides],
        # The first rule that fits a name counts.
        remappings=[
            *_remappings(LaunchConfiguration("remap").perform(context)),
            *((name, LaunchConfiguration(name)) for name in TOPICS),
        ],
        ros_arguments=["--log-level", LaunchConfiguration("log_level")],
        output="screen",
        emulate_tty=True,
        sigkill_timeout=ENDS_WITHIN_S,
        prefix=[END_WITH_LAUNCH, LaunchConfiguration("launch-prefix", default="")],
    )
    return [
        *(
            SetEnvironmentVariable(name, value)
            for name, value in image_transport(context.environment).items()
        ),
        node,
    ]
