"""A real ROS graph for the tests, and nodes beside it as processes of their own."""

import contextlib
import itertools
import json
import os
import re
import time
from pathlib import Path

import pytest

from .perf_process import DOMAIN_ID, Graph, PerfProcess
from .warm_process import WarmProcess

FAST = {
    "tiers": ["fast"],
    "backup": "none",
    "budget_ms": 5000.0,
    "hang_ms": 10_000.0,
    "input_reliability": "reliable",
}
"""A stage that starts quickly, is never late on a busy machine, and loses no message."""

WITHOUT_ROS = ("test_alert_publisher.py", "test_listening_commands.py", "test_terminal.py")
"""Files whose tests need no ROS, or have marks of their own where they do."""


def pytest_collection_modifyitems(items):
    """All other tests of this folder need ROS."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path.name not in WITHOUT_ROS:
            item.add_marker(pytest.mark.ros)


def shared_memory_names():
    """Names in /dev/shm that could be the node's: its killed processes leave some of the middleware behind.

    It has no semaphores (`sem.`): those are of other Python processes of this machine.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("fastrtps", "fastdds", "sem."))}


def unused_shared_memory():
    """Those of them that no process has in its memory.

    Other processes of this machine come and go as well.
    """
    names, mapped = shared_memory_names(), set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return names - mapped


@pytest.fixture(scope="session")
def graph():
    """A ROS graph of these tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        # Small messages do not need LARGE_DATA, with which Fast DDS leaves one participant in a hundred
        # undiscovered.
        patch.setenv("FASTDDS_BUILTIN_TRANSPORTS", "DEFAULT")
        graph = Graph()
        yield graph
        graph.close()


@pytest.fixture
def stranger():
    """A node of a participant of its own, as in another process.

    One participant has one type for a topic.
    """
    import rclpy
    from rclpy.context import Context
    from rclpy.node import Node

    context = Context()
    rclpy.init(context=context, args=[], domain_id=DOMAIN_ID)
    node = Node("stranger", context=context, use_global_arguments=False)
    yield node
    node.destroy_node()
    context.try_shutdown()


@pytest.fixture(scope="session")
def warm_process():
    """What nodes and commands are forked from."""
    process = WarmProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def start_node(graph, warm_process, tmp_path_factory):
    """Start nodes with given parameters.

    At the end each is told to end and has to have left nothing behind.

    Those that are `cold` are processes of their own, started as users do; the others are forks, see
    `warm_process.py`.
    """
    started = []
    numbers = itertools.count()
    unused_before = unused_shared_memory()

    def start(parameters, *, namespace=None, arguments=(), cold=False, prints=None):
        # Names of their own: a killed node stays in the graph for a while.
        number = next(numbers)
        folder = tmp_path_factory.mktemp("node", numbered=True)
        own = f"/run{os.getpid()}_{folder.name}_{number}" if namespace is None else namespace
        warm = None if cold else warm_process
        node = PerfProcess(
            graph, folder, parameters, namespace=own, arguments=arguments, warm=warm, prints=prints
        )
        started.append(node)
        return node

    try:
        yield start
        statuses = {node.name: node.end() for node in started if node.process.poll() is None}
        assert set(statuses.values()) <= {0}, statuses
        graph.wait_for(
            lambda: unused_shared_memory() <= unused_before,
            lambda: f"the end of shared memory that is not used: {unused_shared_memory() - unused_before}",
        )
    finally:
        for node in started:
            node.clear_away()


@pytest.fixture(scope="session")
def image():
    """Makes small camera images."""
    from sensor_msgs.msg import Image

    def make(stamp_ns=None, *, width=64, height=48, encoding="rgb8", size=None):
        stamp_ns = time.time_ns() if stamp_ns is None else stamp_ns
        message = Image(width=width, height=height, encoding=encoding, step=3 * width)
        message.header.frame_id = "camera"
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(stamp_ns, 1_000_000_000)
        message.data = bytes(3 * width * height if size is None else size)
        return message

    return make


@pytest.fixture(scope="module")
def camera(node):
    """Publishes what the module's node takes."""
    from sensor_msgs.msg import Image

    return node.publisher("image", Image)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="session")
def fast():
    """Parameters of a stage that starts quickly and is never late on a busy machine."""

    def make(**changed):
        return {**FAST, **changed}

    return make


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """A folder for orders to the adapter `Obedient`."""
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="session")
def obedient():
    """Parameters of a stage with the adapter `Obedient`."""

    def make(orders=None, *, trigger="image", adapter="Obedient", output="point", **changed):
        options = {"trigger": trigger} | ({} if orders is None else {"orders": str(orders)})
        given = {
            "adapter": f"adapters_for_graph:{adapter}",
            "options": json.dumps(options),
            "output": output,
        }
        return {**FAST, **given, **changed}

    return make


@pytest.fixture
def play(graph, warm_process, tmp_path):
    """Start `torchperf play`; gives the process, and a function that says what it has printed."""
    started = []

    def start(log, *options):
        path = tmp_path / f"player_{len(started)}"
        with path.open("wb") as err:
            environment = os.environ | {"ROS_DOMAIN_ID": str(DOMAIN_ID)}
            process = warm_process.start(
                "torchperf", ["play", str(log), *options], environment, err.fileno()
            )
        started.append(process)
        return process, lambda: path.read_text(errors="replace")

    yield start
    for process in started:
        process.kill()
        process.wait()
