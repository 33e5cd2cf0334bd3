"""Entry of the node process: `torchperf_node`, `ros2 run torchperf_ros torchperf_node`."""

import argparse
import contextlib
import gc
import itertools
import os
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import rclpy  # where it comes as wheels, it starts this process anew: nothing may have been started before
from rclpy.utilities import remove_ros_args

from torchperf_ros.node.middleware import carry_images, end_within, own_segment, remove_dead_segments
from torchperf_ros.node.terminal import passed_on
from torchperf_ros.workers.fork_server import start_base

_EXIT_BAD_PARAMETER = 2
_LOOK_FOR_SIGNALS_S = 0.2
_HELP = (
    "Answers every frame by its deadline; see config/perception.yaml for its parameters, each with a"
    " comment."
)
_ROS_HELP = """examples:
  torchperf_node --params-file my_robot.yaml
  torchperf_node --ros-args --params-file my_robot.yaml -r image:=/camera/image_raw -p device:=cpu
"""
_MEAN_NOTHING = (
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # supervisors send them, to have log files opened anew for example
_SAYS_LITTLE = {"autostart", "device", "use_sim_time"}
_MIDDLEWARE_ENDS_WITHIN_S = 3  # less than the 5 s after which launch sends the next signal


def main(args: list[str] | None = None) -> int:
    """Run the node until a signal ends it. Returns the exit status: 2 for a parameter that is not allowed.

    Signals are handled here and not by rclpy, which takes the context away under the stages while they
    still answer. SIGINT and SIGTERM end the node. So does SIGHUP, the end of a terminal or of a link: then
    the emergency lane stops the vehicle. SIGQUIT ends the process at once, as ever; the lane takes that for
    a death.
    """
    words = ros_arguments(sys.argv[1:] if args is None else args)
    ending, signals = threading.Event(), deque[int]()

    def take(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if number not in _MEAN_NOTHING:
            ending.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_MEAN_NOTHING):
        signal.signal(number, take)
    carry_images()
    os.environ.update(own_segment(os.environ))
    # The base imports torch, which takes seconds, while this process imports the rest. One that was started
    # with another environment than its workers are to have would be of no use.
    with passed_on() as lines_lost:
        start_base()
        return _run(words, ending, signals, lines_lost)


def ros_arguments(words: list[str]) -> list[str]:
    """The command line as rclpy takes it: `--params-file` may stand there without `--ros-args`, too.

    Raises:
        SystemExit: it asks for help, or holds what is no argument.
    """
    parser = argparse.ArgumentParser(
        "torchperf_node",
        description=_HELP,
        epilog=_ROS_HELP,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--params-file", action="append", default=[], metavar="FILE", help="parameters, as ROS has them"
    )
    parser.add_argument(
        "--ros-args", action="store_true", help="before arguments of ROS: remappings, single parameters"
    )
    try:
        own = parser.parse_args(remove_ros_args(_without_ros_files(words)))
    except RuntimeError as error:  # rcl's, whose words may be wrong after --ros-args
        parser.error(_without_places(str(error)))
    files = [word for path in own.params_file for word in ("--params-file", path)]
    return ["--ros-args", *files, "--", *words] if files else words


def _without_ros_files(words: list[str]) -> list[str]:
    """The command line without its parameter files, which `rcl` reads in other words."""
    found: list[str] = []
    of_ros = is_path = False
    for word in words:
        of_ros = (of_ros or word == "--ros-args") and word != "--"
        if not is_path and not (of_ros and word == "--params-file"):
            found.append(word)
        is_path = not is_path and of_ros and word == "--params-file"
    return found


def _unparameterised(given: set[str], words: list[str], stages: list[str]) -> str:
    """The message where no argument names stages to run; empty: one does.

    Raises:
        ConfigError: there is a parameter file, and it is for another node.
    """
    from torchperf_ros.api.errors import ConfigError
    from torchperf_ros.settings.params_file import EXAMPLE

    if not given and "--params-file" in words:
        files = ", ".join(path for word, path in itertools.pairwise(words) if word == "--params-file")
        raise ConfigError(
            f"parameter file {files}: has no entry for this node; it has to be like {EXAMPLE}"
        )
    if given <= _SAYS_LITTLE:
        run = f"{' and '.join(stages)} run the reference models, which know a drawn road only"
        own = "your own models come by --params-file FILE, in a launch params_file:=FILE"
        return f"no parameters were given: {run}; {own}"
    return ""


@contextlib.contextmanager
def _files_for_ros(words: list[str]) -> Iterator[list[str]]:
    """In the block, the command line's parameter files are as the commands read those of the user.

    Raises:
        ConfigError: a parameter file cannot be read, or is none.
    """
    from torchperf_ros.settings.params_file import NODE, params_for_ros

    renamed = [
        match[1] for word in words if (match := re.fullmatch(r"(?:[\w/]*:)?__(?:node|name):=(\w+)", word))
    ]
    with contextlib.ExitStack() as files:
        read = list(words)
        for place in [
            place for place, word in enumerate(words) if word == "--params-file" and words[place + 1 :]
        ]:
            text = params_for_ros(Path(words[place + 1]), (renamed or [NODE])[-1])
            file = files.enter_context(open(os.memfd_create("parameters"), "w", encoding="utf-8"))
            file.write(text or "{}")
            file.flush()
            read[place + 1] = f"/proc/self/fd/{file.fileno()}"
        yield read


def _without_places(text: str) -> str:
    """What rcl says of its arguments in one line, without the places in its own source."""
    return " ".join(re.sub(r",? at /\S+:\d+", "", text).split())


def _run(
    args: list[str], ending: threading.Event, signals: deque[int], lines_lost: Callable[[], int]
) -> int:
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.lifecycle import TransitionCallbackReturn
    from rclpy.signals import SignalHandlerOptions

    from torchperf_ros.api.errors import ConfigError
    from torchperf_ros.node.node import PerfNode
    from torchperf_ros.settings.config import describe_foreign
    from torchperf_ros.workers.worker_setup import remove_dead_folders

    memory_mb, files_mb = remove_dead_segments() / 1e6, remove_dead_folders() / 1e6
    try:
        with _files_for_ros(args) as words:
            rclpy.init(args=words, signal_handler_options=SignalHandlerOptions.NO)
    except (ConfigError, RuntimeError) as error:  # for a file; rcl's, for arguments that it does not know
        print(f"torchperf_node: {_without_places(str(error))}", file=sys.stderr, flush=True)
        return _EXIT_BAD_PARAMETER
    try:
        node = PerfNode(ending, lines_lost)
        try:
            stages = [stage.name for stage in node.parameters.config.stages]
            unparameterised = _unparameterised(node.parameters.given, args, stages)
        except ConfigError:
            node.close()
            raise
    except ConfigError as error:
        print(f"torchperf_node: {error}", file=sys.stderr, flush=True)
        end_within(_MIDDLEWARE_ENDS_WITHIN_S)
        rclpy.try_shutdown()
        return _EXIT_BAD_PARAMETER
    for warning in filter(None, (unparameterised, describe_foreign(node.parameters.foreign))):
        node.get_logger().warning(warning)
    if memory_mb or files_mb:
        freed = f"{memory_mb:.0f} MB of shared memory and {files_mb:.0f} MB of temporary files"
        node.get_logger().info(f"removed {freed} that killed processes had left")
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    if node.parameters.config.autostart and node.trigger_configure() == TransitionCallbackReturn.SUCCESS:
        node.trigger_activate()
    while not ending.is_set() and rclpy.ok():
        while signals and signals[0] in _MEAN_NOTHING:
            node.get_logger().warning(
                f"{signal.Signals(signals.popleft()).name} means nothing to this node"
            )
        try:
            executor.spin_once(timeout_sec=_LOOK_FOR_SIGNALS_S)
        except (
            Exception
        ):  # the receiving thread's boundary: one callback that fails must not take the stages with it,
            # as a transition asked for in the wrong state does, which raises up to here in Humble and Jazzy
            node.get_logger().error(
                f"a callback failed:\n{traceback.format_exc()}", throttle_duration_sec=1.0
            )
    asked = not {signal.SIGINT, signal.SIGTERM}.isdisjoint(signals) or signal.SIGHUP not in signals
    node.close(stop_vehicle=not asked)  # to lose a terminal or a link is no wish to end a drive
    # What is out of garbage collection is not taken down at the interpreter's end. The middleware would not
    # take leave: the node would stay in the graph for 20 s, and its segment of shared memory for longer.
    gc.unfreeze()
    end_within(_MIDDLEWARE_ENDS_WITHIN_S)
    executor.shutdown()
    node.destroy_node()
    rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
