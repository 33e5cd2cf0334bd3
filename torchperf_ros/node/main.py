"""Entry of the node process: `torchperf_node`, `ros2 run torchperf_ros torchperf_node`."""

import signal
import sys
import threading
import traceback
from types import FrameType

import rclpy  # where it comes as wheels, it starts this process anew: nothing may have been started before

from torchperf_ros.workers.fork_server import start_base

_EXIT_BAD_PARAMETER = 2
_LOOK_FOR_SIGNALS_S = 0.2
_MIDDLEWARE_ENDS_WITHIN_S = 3  # less than the 5 s after which launch sends the next signal


def main(args: list[str] | None = None) -> int:
    """Run the node until it is told to end. Returns the exit status: 2 for a parameter that is not allowed.

    Signals are handled here and not by rclpy, which takes the context away under the stages while they still answer.
    """
    start_base()  # it imports torch, which takes seconds, while this process imports the rest
    return _run(args)


def _run(args: list[str] | None) -> int:
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.lifecycle import TransitionCallbackReturn
    from rclpy.signals import SignalHandlerOptions

    from torchperf_ros.frame.errors import ConfigError
    from torchperf_ros.node.middleware import end_within, remove_dead_segments
    from torchperf_ros.node.node import PerfNode
    from torchperf_ros.workers.worker_setup import remove_dead_folders

    ending = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ending.set()

    memory_mb, files_mb = remove_dead_segments() / 1e6, remove_dead_folders() / 1e6
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        node = PerfNode(ending)
    except ConfigError as error:
        print(f"torchperf_node: {error}", file=sys.stderr, flush=True)
        end_within(_MIDDLEWARE_ENDS_WITHIN_S, _EXIT_BAD_PARAMETER)
        rclpy.try_shutdown()
        return _EXIT_BAD_PARAMETER
    if memory_mb or files_mb:
        freed = f"{memory_mb:.0f} MB of shared memory and {files_mb:.0f} MB of temporary files"
        node.get_logger().info(f"removed {freed} that killed processes had left")
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    if node.parameters.config.autostart and node.trigger_configure() == TransitionCallbackReturn.SUCCESS:
        node.trigger_activate()
    while not ending.is_set() and rclpy.ok():
        try:
            executor.spin_once(timeout_sec=_LOOK_FOR_SIGNALS_S)
        except Exception:  # the receiving thread's boundary: one callback that fails must not take the stages with it,
            # as a transition asked for in the wrong state does, which raises up to here in Humble and Jazzy
            node.get_logger().error(f"a callback failed:\n{traceback.format_exc()}", throttle_duration_sec=1.0)
    node.close()
    end_within(_MIDDLEWARE_ENDS_WITHIN_S, 0)
    executor.shutdown()
    node.destroy_node()
    rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
