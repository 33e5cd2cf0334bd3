"""The node's lifecycle, asked for as a client asks for it, and its end by signals."""

import contextlib
import functools
import resource
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("rclpy")

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from sensor_msgs.msg import Image

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.node.endpoints import LATCHED_QOS

from .perf_process import segment_locks


@pytest.fixture(scope="module")
def nodes(start_node, obedient, orders):
    """Nodes that start side by side: one that waits to be configured, and one for each signal."""
    stage = obedient(orders, budget_ms=1500.0, hang_ms=2000.0, hold_last_ms=60_000.0)
    one_stage = {"stages": ["camera"], "camera": stage}
    return {
        "waiting": start_node({**one_stage, "camera": obedient(), "autostart": False}),
        signal.SIGINT: start_node(one_stage, cold=True),  # its interpreter ends as a user's does
        signal.SIGTERM: start_node(one_stage),
    }


@pytest.fixture
def node(nodes):
    """The node that changes its state only on request, as each test finds it: not configured."""
    node = nodes["waiting"]
    if node.state() == "active":
        node.change_state("deactivate")
    if node.state() == "inactive":
        node.change_state("cleanup")
    assert node.state() == "unconfigured"
    lifecycle_told(node, "unconfigured")  # reports from now on are of what the test does
    return node


def memory_files(node):
    """Names of the memory files that the process holds."""
    targets = []
    for file in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(str(file.readlink()))
    return [target for target in targets if "memfd:torchperf" in target]


def lifecycle_told(node, state):
    node.wait_for(lambda: node.values("node").get("lifecycle") == state, f"diagnostics to say {state}")


def test_given_no_autostart_when_started_then_it_waits_to_be_configured(node):
    lifecycle_told(node, "unconfigured")
    level, text, _ = node.statuses["perf: node"]
    assert (level, text) == (1, "not configured (unconfigured)")
    assert set(node.statuses) == {"perf: node"}
    assert not node.workers()
    assert not node.graph.node.count_subscribers(f"{node.namespace}/image")


def test_given_each_transition_then_workers_and_answers_follow(node, image):
    assert node.change_state("configure")
    assert node.state() == "inactive"
    node.wait_until_ready("camera")
    (worker,) = node.workers()
    camera = node.publisher("image", Image)

    def is_ignored():
        ignored = int(node.values("camera")["ignored"])
        camera.publish(image())
        node.counted("camera", ignored=ignored + 1)
        return not node.rows

    assert is_ignored()

    assert node.change_state("activate")
    assert node.state() == "active"
    assert node.answer(camera, image())["outcome"] == Outcome.ON_TIME
    lifecycle_told(node, "active")

    assert node.change_state("deactivate")
    node.forget_rows()
    assert is_ignored()
    assert node.workers() == [worker]  # still warm

    assert node.change_state("activate")
    row = node.answer(camera, image())
    assert (row["outcome"], row["seq"]) == (Outcome.ON_TIME, 1)

    assert node.change_state("deactivate")
    assert node.change_state("cleanup")
    assert node.state() == "unconfigured"
    assert not node.workers()
    assert not memory_files(node)
    node.graph.wait_for(lambda: not camera.get_subscription_count(), "the subscription to go")
    node.wait_for(
        lambda: not node.graph.node.count_publishers(f"{node.namespace}/point"), "the publisher to go"
    )
    lifecycle_told(node, "unconfigured")  # so that the stage's status is not of its life before

    assert node.change_state("configure")
    assert node.change_state("activate")
    node.wait_until_ready("camera")
    node.wait_for(camera.get_subscription_count, "a new subscription")
    node.acquaint()
    row = node.answer(camera, image())
    assert (row["outcome"], row["seq"]) == (Outcome.ON_TIME, 0)
    assert node.workers() != [worker]


def test_given_a_transition_that_the_state_does_not_have_then_it_is_refused_and_the_node_lives(node):
    client = node.graph.node.create_client(ChangeState, f"{node.name}/change_state")
    node.wait_for(client.service_is_ready, "the service")
    node.acquaint()
    answer = client.call_async(
        ChangeState.Request(transition=Transition(id=Transition.TRANSITION_ACTIVATE))
    )
    assert node.state() == "unconfigured"
    assert not answer.done() or not answer.result().success  # Humble's and Jazzy's rclpy does not answer it
    node.graph.node.destroy_client(client)
    node.next_report()


def test_given_an_error_while_configuring_then_it_is_told_and_configure_can_be_tried_again(node):
    descriptors = len(list(Path(f"/proc/{node.process.pid}/fd").iterdir()))
    limits = node.process.rlimit(resource.RLIMIT_NOFILE)
    node.process.rlimit(resource.RLIMIT_NOFILE, (descriptors, limits[1]))
    assert not node.change_state("configure")
    node.process.rlimit(resource.RLIMIT_NOFILE, limits)
    assert node.state() == "unconfigured"
    node.prints("on_configure failed:")
    node.prints("Too many open files")
    assert not node.workers()
    assert not memory_files(node)

    assert node.change_state("configure")
    assert len(node.workers()) == 1


def test_given_no_stage_that_can_be_described_when_configured_then_it_fails_with_the_reason(
    start_node, obedient
):
    node = start_node({"stages": ["camera"], "autostart": False, "camera": obedient(adapter="Missing")})
    assert not node.change_state("configure")
    assert node.state() == "unconfigured"
    node.prints("stage camera cannot run: ")
    node.prints("adapters_for_graph has no Adapter class 'Missing'")
    assert not node.workers()
    assert not memory_files(node)


def test_given_a_worker_that_never_describes_itself_when_told_to_end_then_configure_gives_up(
    start_node, obedient
):
    node = start_node({"stages": ["camera"], "camera": obedient(adapter="Silent")})
    node.wait_for(node.workers, "a worker")
    began = time.monotonic()
    assert node.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 60.0  # and not when start_timeout_s, 120 s, is over


def test_given_a_picture_that_its_publisher_keeps_when_nodes_start_before_and_after_it_then_each_answers_it_once(
    start_node, obedient, stranger, image
):
    start = functools.partial(start_node, {"stages": ["camera"], "camera": obedient()})
    early = start(arguments=("-r", "image:=/still"))
    early.wait_until_ready("camera")
    camera = stranger.create_publisher(Image, "/still", LATCHED_QOS)
    camera.publish(image())
    for node in (early, start(arguments=("-r", "image:=/still"))):
        node.counted("camera", on_time=1)
        node.next_report()
        assert node.values("camera")["frames"] == "1"


@pytest.mark.parametrize("way", ["deactivate", "shutdown", signal.SIGINT], ids=str)
def test_given_a_frame_that_runs_when_the_node_is_to_end_then_it_is_answered_by_its_deadline_first(
    nodes, image, orders, way
):
    from geometry_msgs.msg import PointStamped

    node = nodes[way if way is signal.SIGINT else signal.SIGTERM]
    if node.state() == "inactive":
        assert node.change_state("activate")
    node.wait_until_ready("camera")
    camera, points = (
        node.publisher("image", Image),
        node.graph.listen(f"{node.namespace}/point", PointStamped),
    )
    node.wait_for(lambda: node.graph.node.count_publishers(f"{node.namespace}/point"), "the output")
    node.acquaint()
    node.wait_for(lambda: node.answer(camera, image())["outcome"] == Outcome.ON_TIME, "an answer in time")
    node.wait_for(lambda: points, "the point")
    answered, fresh = len(node.rows), len(points)
    (orders / "doing").unlink(missing_ok=True)
    (orders / "sleep-32").touch()
    camera.publish(image(width=32))
    node.wait_for((orders / "doing").exists, "the worker to have begun")
    if way is signal.SIGINT:
        assert node.workers()
        assert (locks := segment_locks(node.process))
        assert node.end(way) == 0  # waits until the workers are gone as well
        # which it removes as it takes leave of the graph; else its name would stay there for 20 s
        assert not any(lock.exists() for lock in locks)
        assert "Traceback" not in node.errors
    else:
        assert node.change_state(way)
    node.graph.wait_for(
        lambda: len(node.rows) > answered and len(points) > fresh,
        lambda: f"the answer: {node.rows}, {points}",
    )
    row = node.rows[answered]
    assert row["outcome"] == Outcome.LATE
    assert row["total_ms"] < 1500.0 + 1000.0  # the machine may be busy
    assert points[fresh] == points[fresh - 1]  # held


def test_given_an_inactive_node_when_shut_down_then_it_is_finalized_and_has_no_worker(node):
    assert node.change_state("configure")
    assert node.change_state("shutdown")
    assert node.state() == "finalized"
    assert not node.workers()
    lifecycle_told(node, "finalized")
    assert node.end(signal.SIGTERM) == 0
