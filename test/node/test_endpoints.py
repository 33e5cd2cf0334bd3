"""Publishing bytes without what rclpy does around it, and why a topic is silent."""

import itertools
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("rclpy")

from rclpy.node import Node
from rclpy.qos import ReliabilityPolicy, qos_profile_sensor_data
from std_msgs.msg import Char, Float64, String

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Health
from torchperf_ros.node.endpoints import LATCHED_QOS, OUTPUT_QOS, Endpoints, RawPublisher, resolved
from torchperf_ros.node.input_watch import InputWatch, why_silent
from torchperf_ros.node.reporter import Reporter
from torchperf_ros.observe.telemetry.rows import float64_bytes
from torchperf_ros.stage.wiring import StageInput


def test_given_bytes_when_published_raw_then_they_arrive_and_rclpy_does_nothing_around_it(
    graph, stranger, monkeypatch
):
    heard = graph.listen("/raw/number", Float64)
    publisher = RawPublisher(stranger.create_publisher(Float64, "/raw/number", OUTPUT_QOS))
    assert publisher.topic_name == "/raw/number"
    graph.wait_for(lambda: publisher.publisher.get_subscription_count() > 0, "a subscription")
    monkeypatch.setattr("rclpy.publisher.Publisher.publish", None)
    # again: the subscription may not know of the publisher yet, which knows of it
    graph.wait_for(lambda: publisher.publish(float64_bytes(1.5)) or heard, "the number")
    assert {message.data for message in heard} == {1.5}


def test_given_a_publisher_that_is_destroyed_when_publishing_then_it_raises(stranger: Node):
    publisher = RawPublisher(stranger.create_publisher(String, "/raw/gone", OUTPUT_QOS))
    stranger.destroy_publisher(publisher.publisher)
    with pytest.raises(Exception, match="invalid|destroy"):
        publisher.publish(b"\0\1\0\0")


def test_given_a_name_that_no_topic_can_have_when_resolved_then_the_error_says_which_and_why(graph):
    assert resolved(graph.node, "scan") == "/scan"
    with pytest.raises(
        ConfigError, match=r"^.li dar. is not allowed as the name of a topic: topic name must"
    ):
        resolved(graph.node, "li dar")


def test_given_no_messages_when_the_graph_is_asked_then_it_says_why(graph, stranger):
    # Of a type that no node has: one of another test's that was killed stays in the graph for 20 s.
    config = SimpleNamespace(input_reliability="reliable")
    source = StageInput(SimpleNamespace(config=config), 0, "/silent/image", "std_msgs/msg/Char", True)
    node = graph.node
    alone = "no node publishes it, nor another topic of its type (std_msgs/msg/Char), in ROS_DOMAIN_ID"
    assert why_silent(node, source).startswith(alone)
    output = node.create_publisher(Char, "/silent/output", OUTPUT_QOS)
    graph.wait_for(lambda: node.count_publishers("/silent/output"), "the node's own output")
    assert why_silent(node, source).startswith(alone)  # what a node gives out is not what it lacks

    other = stranger.create_publisher(Char, "/silent/camera", OUTPUT_QOS)
    remap = "there is /silent/camera: start this node with `--ros-args -r /silent/image:=/silent/camera`"
    graph.wait_for(lambda: remap in why_silent(node, source), "the topic that could be remapped")
    node.destroy_publisher(output)
    wrong = stranger.create_publisher(String, "/silent/image", OUTPUT_QOS)
    graph.wait_for(
        lambda: "publishes std_msgs/msg/String, not" in why_silent(node, source), "the other type"
    )
    stranger.destroy_publisher(wrong)
    sensor = stranger.create_publisher(Char, "/silent/image", qos_profile_sensor_data)
    graph.wait_for(
        lambda: "set it to best_effort" in why_silent(node, source), "the reliability that does not fit"
    )
    config.input_reliability = "best_effort"
    assert "it has stopped, or" in why_silent(node, source)
    for publisher in (other, sensor):
        stranger.destroy_publisher(publisher)


def test_given_silent_inputs_when_five_seconds_have_passed_then_each_says_so_once_and_again_when_the_graph_changes():
    said, there, published = [], [], {}
    camera = SimpleNamespace(node_name="driver", node_namespace="/")
    node = SimpleNamespace(
        get_publishers_info_by_topic=lambda topic: [camera] if topic in there else published.get(topic, []),
        get_topic_names_and_types=lambda: [(topic, ["sensor_msgs/msg/Image"]) for topic in there],
        get_logger=lambda: SimpleNamespace(warning=said.append),
        get_fully_qualified_name=lambda: "/perf",
    )
    sources = [
        StageInput(
            SimpleNamespace(
                config=SimpleNamespace(name=name, input_reliability="reliable"),
                statistics=SimpleNamespace(counters=SimpleNamespace(frames=frames)),
            ),
            index,
            topic,
            "sensor_msgs/msg/Image",
            True,
        )
        for name, frames, index, topic in (
            ("first", 3, 0, "/image"),
            ("second", 8, 0, "/image"),
            ("second", 8, 1, "/side"),
        )
    ]
    watch = InputWatch(node)
    seconds = itertools.count(1)

    def look(count):
        said.clear()
        for second in itertools.islice(seconds, count):
            watch.look(sources, second * 1_000_000_000)
        return [text.partition(" for 5 s")[0] for text in said]

    assert look(5) == []
    assert look(15) == ["no message on /image", "no message on /image", "no message on /side"]
    assert "nor another topic of its type (sensor_msgs/msg/Image), in ROS_DOMAIN_ID" in said[0]
    sources[0].stage.statistics.counters.frames += 1
    side = SimpleNamespace(
        node_name="side",
        topic_type="std_msgs/msg/String",
        qos_profile=SimpleNamespace(reliability=ReliabilityPolicy.BEST_EFFORT),
    )
    published["/side"] = [side]
    assert look(20) == ["no message on /side", "no message on /image"]
    side.topic_type = "sensor_msgs/msg/Image"
    assert look(5) == ["no message on /side"]
    side.qos_profile.reliability = ReliabilityPolicy.RELIABLE
    assert look(20) == []
    assert [status.name for status in watch.silences()] == [
        "perf: second input",
        "perf: first input",
    ]
    there += ["/camera/front"]
    assert look(20) == ["no message on /image"] * 2
    assert all("of its type there is /camera/front: start" in text for text in said)
    there += ["/camera/rear"]
    assert look(20) == ["no message on /image"] * 2
    there.pop()
    assert look(20) == []  # the log has it already


def looked_at(*, is_simulated, clocks, age_ms, seconds=20):
    """What a node says of its clock after so long, whose trigger has frames of this median age."""
    node = SimpleNamespace(
        get_parameter=lambda _: SimpleNamespace(value=is_simulated),
        resolve_topic_name=lambda topic: topic,
        count_publishers=lambda topic: clocks if topic == "/clock" else 1,
    )
    stage = SimpleNamespace(config=SimpleNamespace(name="camera"))
    sources = [StageInput(stage, index, f"/{index}", "sensor_msgs/msg/Image", True) for index in (1, 0)]
    watch, statuses = InputWatch(node), {"perf: camera": {"age_p50_ms": str(age_ms)}}
    watch.clocks(sources, statuses, 1)
    return watch.clocks(sources, statuses, 1 + seconds * 1_000_000_000)


YEAR_MS = 365.25 * 86_400e3


def test_given_a_clock_that_one_side_alone_goes_by_when_looked_at_then_one_warning_says_which_and_by_how_much():
    assert looked_at(is_simulated=False, clocks=1, age_ms=2.5 * YEAR_MS) == {
        "stamps_warning": (
            "stamps on /0 are 2.5 years behind this node's clock, and /clock is published: start this node"
            " with -p use_sim_time:=true"
        )
    }
    ahead = looked_at(is_simulated=True, clocks=1, age_ms=-90_000e3)["stamps_warning"]
    assert ahead.startswith(
        "stamps on /0 are 1.0 days ahead of /clock, which this node goes by: set use_sim_time for"
    )
    still = looked_at(is_simulated=True, clocks=0, age_ms=math.nan)["clock_warning"]
    assert still.startswith("use_sim_time is true, and no node publishes /clock")
    assert looked_at(is_simulated=True, clocks=0, age_ms=math.nan, seconds=2) == {}


@pytest.mark.parametrize(
    ("is_simulated", "clocks", "age_ms"),
    [
        (True, 1, 30.0),
        (True, 1, math.nan),
        (False, 1, 30.0),
        (False, 0, 30.0),
        (False, 0, 2 * YEAR_MS),
    ],
)
def test_given_clocks_that_fit_or_none_that_is_simulated_when_looked_at_then_nothing_is_said(
    is_simulated, clocks, age_ms
):
    assert looked_at(is_simulated=is_simulated, clocks=clocks, age_ms=age_ms) == {}


def test_given_a_stage_that_loads_and_compiles_when_looked_at_then_each_step_is_on_the_terminal_once():
    said = []
    update = SimpleNamespace(compiling="")
    stage = SimpleNamespace(
        config=SimpleNamespace(name="camera", budget_ms=50.0),
        pool=SimpleNamespace(progress="", rolling_update=update, loaded_tiers=["full", "fast"]),
    )
    reporter = SimpleNamespace(
        _node=SimpleNamespace(get_logger=lambda: SimpleNamespace(info=said.append)), _doing={}, _ready=set()
    )
    steps = [
        (Health.STARTING, "worker 0 waits for torch to be imported", ""),
        (Health.STARTING, "worker 0 loading full (1 of 2)", ""),
        (Health.WAITING, "worker 0 idle", ""),
        (Health.WAITING, "worker 0 idle", "compiling 1 of 2"),
        (Health.NOMINAL, "worker 0 busy", "compiling 2 of 2"),
        (Health.SAFE_STOP, "worker 0 idle", ""),
        (Health.NOMINAL, "worker 0 idle", ""),
    ]
    for health, progress, compiling in steps:
        stage.pool.progress, update.compiling = progress, compiling
        for _ in range(3):
            Reporter._log_progress(reporter, stage, health)
    assert said == [
        "stage camera: worker 0 waits for torch to be imported",
        "stage camera: worker 0 loading full (1 of 2)",
        "stage camera is ready: full, fast, each frame within 50 ms",
        "stage camera: compiling 1 of 2",
        "stage camera: compiling 2 of 2",
        "stage camera: nothing more is compiled",
    ]


def taking(inputs, output="latched/out", output_type=""):
    """What a stage has taken, and the stage, with these inputs and their types."""
    heard = []
    return heard, SimpleNamespace(
        config=SimpleNamespace(name="stage", output=output, input_reliability="best_effort", stream=""),
        actions=type("NoActions", (), {"_lines": ()})(),
        inputs=[(number, topic, kind) for number, (topic, kind) in enumerate(inputs)],
        pool=SimpleNamespace(description=None, ready=False),
        output_type=output_type,
        offer=lambda data, stamp_ns, stamped: heard.append(0),
        offer_latest=lambda index, data, stamp_ns: heard.append(index),
    )


def test_given_publishers_that_keep_their_message_when_asked_then_each_input_has_it_once_whoever_starts_first(
    graph, stranger
):
    topics = ["latched/image", "latched/info"]
    heard, stage = taking([(topic, "std_msgs/msg/String") for topic in topics])
    endpoints = Endpoints(graph.node, 1, None)
    first = stranger.create_publisher(String, topics[0], LATCHED_QOS)
    first.publish(String(data="still picture"))  # by the volatile subscription it can never come
    endpoints.connect([stage], None, heard.append)
    last = stranger.create_publisher(String, topics[1], LATCHED_QOS)
    last.publish(String(data="calibration"))
    graph.wait_for(lambda: endpoints.ask_for_kept() or 1 in heard, "the latched message")
    stage.pool.ready = endpoints.active = True  # before, a trigger would be lost
    graph.wait_for(lambda: endpoints.ask_for_kept() or 0 in heard, "the latched trigger")
    for count in range(3):
        heard.clear()
        for publisher in (first, last):
            publisher.publish(String(data=f"newer {count}"))
        graph.wait_for(lambda: len(heard) > 1, "both, by two subscriptions each")
        assert sorted(heard) == [0, 1]
    endpoints.take_no_more()


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ([("own", "std_msgs/msg/String")], "std_msgs/msg/String"),
        ([("other", "std_msgs/msg/String"), ("own", "std_msgs/msg/Float64")], "std_msgs/msg/String"),
        ([("own", "std_msgs/msg/String"), ("own", "std_msgs/msg/Float64")], ""),
    ],
    ids=["its own output is its trigger", "its own output is of another type", "two types"],
)
def test_given_a_topic_that_a_stage_cannot_take_when_connected_then_the_error_names_it(graph, inputs, kind):
    _, stage = taking(inputs, "own", kind)
    with pytest.raises(ConfigError, match="^stage stage takes /own as .*: remap one of them"):
        Endpoints(graph.node, 1, None).connect([stage], None, print)
