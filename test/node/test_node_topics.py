"""The contract of the node's topics.

Names, types, labels, one row for every frame, stamps, qualities of service.
"""

import math
import time

import pytest

pytest.importorskip("rclpy")

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry, Path
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import Float64, Float64MultiArray
from visualization_msgs.msg import MarkerArray

from .perf_process import odometry

FRAMES = 40
PERCEPTION, PLANNING = 0, 1
LABELS = [
    "stage",
    "seq",
    "age_ms",
    "wait_ms",
    "decode_ms",
    "preprocess_ms",
    "inference_ms",
    "postprocess_ms",
    "total_ms",
    "budget_ms",
    "tier",
    "outcome",
    "fallback",
    "check",
    "scene",
    "missing_inputs",
    "deadline_ms",
    "lateness_ms",
    "stale",
    "stream",
]
MEMORY_LABELS = [
    "node_rss_mib",
    "workers_rss_mib",
    "cuda_allocated_mib",
    "cuda_reserved_mib",
    "cuda_free_mib",
    "history_mib",
    "shared_memory_mib",
    "node_pss_mib",
    "workers_pss_mib",
    "cuda_peak_mib",
    "cuda_inactive_split_mib",
    "cuda_alloc_retries",
    "cuda_out_of_memory",
    "workers_kept_mib",
]
STAGE_KEYS = {
    "health",
    "progress",
    "tier",
    "tiers",
    "engine",
    "device",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "max_ms",
    "budget_ms",
    "reserve_ms",
    "miss_ratio",
    "frames",
    "answered",
    "on_time",
    "late",
    "error",
    "invalid",
    "crashed",
    "hung",
    "unanswered",
    "ladder",
    "bad_input",
    "starting",
    "fallback_backup",
    "fallback_hold_last",
    "fallback_stop",
    "fallback_none",
    "superseded",
    "dropped",
    "stale",
    "restarts",
    "worker_0_pid",
    "worker_0_state",
    "worker_0_rss_mib",
    "last_error",
}


def stamp_ns(message):
    return message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec


class Drive:
    """What a listener heard while 40 images, one after the other, went through both reference stages."""

    def __init__(self, graph, start_node, image, fast):
        self.graph = graph
        # Inputs are best effort, as they are by default; it counts as driving until it has been looked at.
        self.stage = stage = fast(input_reliability="best_effort", input_timeout_ms=600_000.0)
        self.node = node = start_node({"perception": stage, "planning": stage}, namespace="")
        self.latencies = graph.listen("/perf/latency", Float64)
        self.records = graph.listen("/perf/latency_stages", Float64MultiArray)
        self.memory = graph.listen("/perf/memory", Float64)
        self.memory_stats = graph.listen("/perf/memory_stats", Float64MultiArray)
        self.detections = graph.listen("/detections", MarkerArray)
        self.trajectories = graph.listen("/trajectory", Path)
        node.wait_until_ready("perception", "planning")
        camera = node.publisher("image", Image)
        node.tell(node.publisher("odom", Odometry), odometry(10.0, x=0.0, frame="map"))
        self.stamps = []
        for _ in range(FRAMES):
            self.stamps.append(time.time_ns())
            node.answer(camera, image(self.stamps[-1]), stage=PLANNING)
        heard = (self.latencies, self.detections, self.trajectories)
        node.wait_for(
            lambda: all(len(messages) >= FRAMES for messages in heard) and len(self.records) >= 2 * FRAMES,
            lambda: f"every message; heard {[len(messages) for messages in heard]} and {len(self.records)}",
        )
        node.next_report()  # and nothing else has come
        self.rows = {stage: node.rows_of(stage) for stage in (PERCEPTION, PLANNING)}


@pytest.fixture(scope="module")
def drive(graph, start_node, image, fast):
    return Drive(graph, start_node, image, fast)


def test_given_a_drive_then_every_stage_has_one_row_for_every_frame_in_order(drive):
    for stage in (PERCEPTION, PLANNING):
        rows = drive.rows[stage]
        first = int(rows[0]["seq"])
        assert [row["seq"] for row in rows] == list(range(first, first + FRAMES))


def test_given_a_drive_then_rows_have_fixed_labels_and_add_up(drive):
    for record in drive.records:
        assert [dim.label for dim in record.layout.dim] == LABELS
        assert [(dim.size, dim.stride) for dim in record.layout.dim] == [(1, 1)] * len(LABELS)
        assert len(record.data) == len(LABELS)
    for row in (*drive.rows[PERCEPTION], *drive.rows[PLANNING]):
        assert (row["tier"], row["outcome"]) == (0, 0)
        assert math.isnan(row["fallback"])
        assert math.isnan(row["check"])
        assert row["budget_ms"] == drive.stage["budget_ms"]
        assert row["lateness_ms"] == pytest.approx(row["total_ms"] - row["deadline_ms"], abs=1e-6)
        assert row["stale"] == 0
        assert 0 <= row["age_ms"] < 10_000
        steps = ("wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
        assert 0 < sum(row[step] for step in steps) <= row["total_ms"] < row["budget_ms"]


def test_given_a_drive_then_end_to_end_latency_is_told_once_for_each_image_and_within_both_budgets(drive):
    assert len(drive.latencies) == FRAMES
    assert all(0 < latency.data < 2 * drive.stage["budget_ms"] for latency in drive.latencies)
    for latency, row in zip(drive.latencies, drive.rows[PERCEPTION], strict=True):
        assert latency.data > row["age_ms"] + row["total_ms"]


def test_given_a_drive_then_outputs_carry_the_stamp_of_their_image(drive):
    assert [stamp_ns(path) for path in drive.trajectories] == drive.stamps
    for markers, expected in zip(drive.detections, drive.stamps, strict=True):
        assert {stamp_ns(marker) for marker in markers.markers} <= {expected}
    assert any(markers.markers for markers in drive.detections)
    assert {path.header.frame_id for path in drive.trajectories} == {"map"}  # odometry was taken in


def test_given_both_stages_in_one_node_then_detections_are_handed_over_without_dds(drive):
    assert drive.graph.node.count_publishers("/detections") == 1
    nodes = {info.node_name for info in drive.graph.node.get_subscriptions_info_by_topic("/detections")}
    assert nodes == {"tests"}
    assert len(drive.rows[PLANNING]) == FRAMES


def test_given_a_drive_then_memory_is_told_in_mib(drive):
    drive.node.wait_for(lambda: drive.memory_stats and drive.memory, "memory")
    stats = drive.memory_stats[-1]
    assert [dim.label for dim in stats.layout.dim] == MEMORY_LABELS
    values = dict(zip(MEMORY_LABELS, stats.data, strict=True))
    assert 10 < values["node_rss_mib"] < 4096
    assert 100 < drive.memory[-1].data < 16384  # two workers with torch
    assert drive.memory[-1].data == pytest.approx(values["workers_rss_mib"])
    assert values["shared_memory_mib"] > 0
    assert math.isnan(values["cuda_allocated_mib"])


def test_given_a_drive_then_diagnostics_say_how_both_stages_and_the_node_are_doing(drive):
    node = drive.node
    assert set(node.statuses) == {"perf: perception", "perf: planning", "perf: node"}
    for stage in ("perception", "planning"):
        values = node.values(stage)
        assert values.keys() >= STAGE_KEYS
        assert values["health"] == "NOMINAL"
        assert values["tier"] == "fast"
        assert int(values["frames"]) == int(values["answered"]) == int(values["on_time"]) >= FRAMES
        assert float(values["miss_ratio"]) == 0.0
        assert 0 < float(values["p50_ms"]) <= float(values["p95_ms"]) <= float(values["p99_ms"])
        assert int(values["worker_0_pid"]) in {worker.pid for worker in node.workers()}
        level, text, _ = node.statuses[f"perf: {stage}"]
        assert (level, text) == (0, "NOMINAL: tier fast")
    own = node.values("node")
    assert (own["lifecycle"], own["health"], own["pid"]) == ("active", "NOMINAL", str(node.process.pid))
    assert own["inputs_taken"] == "into shared memory"


def test_given_a_running_node_then_its_topics_have_the_types_of_the_contract(drive):
    types = drive.graph.node.get_topic_names_and_types()
    assert {
        name: kinds for name, kinds in types if name.startswith(("/perf/", "/det", "/traj", "/diag"))
    } == {
        "/perf/latency": ["std_msgs/msg/Float64"],
        "/perf/latency_stages": ["std_msgs/msg/Float64MultiArray"],
        "/perf/memory": ["std_msgs/msg/Float64"],
        "/perf/memory_stats": ["std_msgs/msg/Float64MultiArray"],
        "/perf/anomaly": ["diagnostic_msgs/msg/DiagnosticArray"],
        "/perf/transition_event": ["lifecycle_msgs/msg/TransitionEvent"],
        "/diagnostics": ["diagnostic_msgs/msg/DiagnosticArray"],
        "/detections": ["visualization_msgs/msg/MarkerArray"],
        "/trajectory": ["nav_msgs/msg/Path"],
    }  # and so nothing is published below /perf/latency or /perf/memory


def test_given_a_running_node_then_outputs_are_reliable_and_inputs_are_best_effort(drive):
    own = drive.graph.node
    outputs = ("latency", "latency_stages", "memory", "memory_stats", "anomaly")
    for topic in (*(f"/perf/{name}" for name in outputs), "/detections", "/trajectory", "/diagnostics"):
        # an endpoint may be discovered before the name of its node
        (info,) = drive.graph.wait_for(
            lambda topic=topic: [
                info
                for info in own.get_publishers_info_by_topic(topic)
                if (info.node_name, info.node_namespace) == ("perf", "/")
            ],
            f"the node's publisher of {topic}",
        )
        assert info.qos_profile.reliability == ReliabilityPolicy.RELIABLE, topic
        assert info.qos_profile.durability == DurabilityPolicy.VOLATILE, topic
    for topic in ("/image", "/odom"):
        (info,) = drive.graph.wait_for(
            lambda topic=topic: own.get_subscriptions_info_by_topic(topic),
            f"the node's subscription of {topic}",
        )
        assert info.qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT, topic
        assert info.qos_profile.durability == DurabilityPolicy.VOLATILE, topic


def test_given_a_namespace_and_remappings_when_started_then_all_names_follow(
    graph, start_node, image, obedient
):
    remapped = (
        "-r",
        "image:=/camera/image_raw",
        "-r",
        "point:=there/point",
        "-r",
        "/diagnostics:=/car/diagnostics",
    )
    diagnostics = graph.listen("/car/diagnostics", DiagnosticArray)
    node = start_node(
        {"stages": ["camera"], "camera": obedient()}, namespace="/car/front", arguments=remapped
    )
    camera = graph.node.create_publisher(Image, "/camera/image_raw", 10)
    node.wait_for(camera.get_subscription_count, "a subscription of the remapped image")
    node.wait_for(
        lambda: any("WAITING" in s.message for d in diagnostics for s in d.status), "the stage to be ready"
    )
    node.acquaint()
    node.answer(camera, image())

    for name in (
        "/car/front/perf/latency",
        "/car/front/perf/memory",
        "/car/front/there/point",
        "/car/diagnostics",
    ):
        node.wait_for(lambda name=name: graph.node.count_publishers(name), f"a publisher of {name}")
    assert {status.hardware_id for d in diagnostics for status in d.status} == {"/car/front/perf"}
