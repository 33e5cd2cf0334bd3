"""The perception and planning node, configured and activated: `ros2 launch torchperf_ros perception.launch.py`."""

from pathlib import Path

import lifecycle_msgs.msg
from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
)
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState

from torchperf_ros.node.middleware import image_transport

END_WITH_LAUNCH = "setpriv --pdeathsig TERM "  # a launch that is terminated leaves its processes behind otherwise
TOPICS = {
    "image": "Camera images, sensor_msgs/msg/Image: the frames that perception answers by their deadline.",
    "odom": "The vehicle's motion, nav_msgs/msg/Odometry: planning's second input.",
    "detections": "Perception's output and planning's trigger, one message for every frame.",
    "trajectory": "Planning's output, nav_msgs/msg/Path, one message for every frame.",
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; the node itself is made when their values are known."""
    arguments = [DeclareLaunchArgument(name, default_value=name, description=text) for name, text in TOPICS.items()]
    arguments += [
        DeclareLaunchArgument(
            "params_file",
            default_value=str(Path(__file__).resolve().parents[1] / "config" / "perception.yaml"),
            description="Parameters of the node; the default file holds every one, each with a comment.",
        ),
        DeclareLaunchArgument(
            "device", default_value="", description="auto, cpu, cuda or cuda:N; empty: as params_file says."
        ),
        DeclareLaunchArgument(
            "use_sim_time",
            default_value="",
            choices=["", "true", "false"],
            description="Take the time from /clock, as for a replayed bag or a simulator; empty: as params_file says.",
        ),
        DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node and its topics."),
        DeclareLaunchArgument(
            "log_level", default_value="info", description="debug, info, warn, error or fatal, of the node's log."
        ),
    ]
    return LaunchDescription([*arguments, OpaqueFunction(function=_start)])


def _start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The node and the two transitions that bring it to `active`."""
    # This file makes the transitions, so the node must not make them as well.
    overrides: dict[str, str | bool] = {"autostart": False}
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
        parameters=[LaunchConfiguration("params_file"), overrides],
        remappings=[(name, LaunchConfiguration(name)) for name in TOPICS],
        ros_arguments=["--log-level", LaunchConfiguration("log_level")],
        output="screen",
        emulate_tty=True,
        prefix=[END_WITH_LAUNCH, LaunchConfiguration("launch-prefix", default="")],
    )
    configured = OnStateTransition(
        target_lifecycle_node=node,
        start_state="configuring",
        goal_state="inactive",
        entities=[_change(node, lifecycle_msgs.msg.Transition.TRANSITION_ACTIVATE)],
        handle_once=True,  # who cleans the node up later and configures it anew decides when to activate it
    )
    return [
        *(SetEnvironmentVariable(name, value) for name, value in image_transport(context.environment).items()),
        RegisterEventHandler(configured),
        node,
        _change(node, lifecycle_msgs.msg.Transition.TRANSITION_CONFIGURE),
    ]


def _change(node: LifecycleNode, transition_id: int) -> EmitEvent:
    return EmitEvent(event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=transition_id))
