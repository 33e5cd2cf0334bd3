"""`torchperf play` as a process, into a real graph: what arrives there, and what it says."""

import re
import signal

import pytest
from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

pytest.importorskip("rclpy")

from geometry_msgs.msg import PointStamped
from rclpy.qos import DurabilityPolicy
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String
from std_srvs.srv import Trigger
from typer.testing import CliRunner

from torchperf_ros.tools.main import app

STORE = get_typestore(Stores.ROS2_JAZZY)
STORE.register(get_types_from_msg("float64 x", "nowhere_msgs/msg/Strange"))
POINT, STRING, STRANGE = "geometry_msgs/msg/PointStamped", "std_msgs/msg/String", "nowhere_msgs/msg/Strange"
MS, S = 1_000_000, 1_000_000_000
START_NS = 1_600_000_000 * S
FRAMES = 10
EVERY_MS = 20
ALWAYS = QosTime(2147483647, 4294967295)
LATCHED = Qos(
    QosHistory.KEEP_LAST,
    1,
    QosReliability.RELIABLE,
    QosDurability.TRANSIENT_LOCAL,
    ALWAYS,
    ALWAYS,
    QosLiveliness.AUTOMATIC,
    ALWAYS,
    avoid_ros_namespace_conventions=False,
)


def point(t_ns, name):
    types = STORE.types
    header = types["std_msgs/msg/Header"](types["builtin_interfaces/msg/Time"](*divmod(t_ns, S)), name)
    return bytes(
        STORE.serialize_cdr(types[POINT](header, types["geometry_msgs/msg/Point"](1.0, 2.0, 3.0)), POINT)
    )


def t_ns(number):
    return START_NS + number * EVERY_MS * MS


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A latched word, a type that is not installed, and points every 20 ms, stamped 5 ms earlier."""
    folder = tmp_path_factory.mktemp("log") / "log"
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        word = writer.add_connection("/word", STRING, typestore=STORE, offered_qos_profiles=[LATCHED])
        frame = writer.add_connection("/frame", POINT, typestore=STORE)
        strange = writer.add_connection("/strange", STRANGE, typestore=STORE)
        writer.write(word, START_NS, STORE.serialize_cdr(STORE.types[STRING]("kept"), STRING))
        writer.write(strange, START_NS, STORE.serialize_cdr(STORE.types[STRANGE](1.0), STRANGE))
        for number in range(FRAMES):
            writer.write(frame, t_ns(number), point(t_ns(number) - 5 * MS, f"frame {number}"))
    return folder


def ended(graph, process):
    """Its exit status."""
    graph.wait_for(lambda: process.poll() is not None, "the end of the player")
    return process.returncode


def nanoseconds(stamp):
    return stamp.sec * S + stamp.nanosec


def trigger(graph, name):
    answer = graph.call(Trigger, f"/player/{name}", Trigger.Request())
    return answer.success, answer.message


def test_given_a_log_when_played_then_its_bytes_arrive_in_order_with_the_log_s_time(graph, play, log):
    frames, words, times = [], graph.listen("/other/word", String), graph.listen("/clock", Clock)
    graph.node.create_subscription(
        PointStamped, "/other/frame", lambda data: frames.append(bytes(data)), 20, raw=True
    )
    process, printed = play(
        log,
        "--clock",
        "--remap",
        "/frame:=/other/frame",
        "--remap",
        "/word:=/other/word",
        "--topics",
        "/frame,/word",
        "--wait-for-subscribers",
        "60",
    )
    graph.wait_for(lambda: len(frames) == FRAMES, lambda: f"all frames; it printed {printed()}")
    sent = [point(t_ns(number) - 5 * MS, f"frame {number}") for number in range(FRAMES)]
    assert frames == [data + bytes(-len(data) % 4) for data in sent]  # as DDS pads it
    assert ended(graph, process) == 0
    graph.wait_for(
        lambda: words and nanoseconds(times[-1].clock) >= t_ns(FRAMES - 1), "the word and the last time"
    )
    told = [nanoseconds(message.clock) for message in times]
    assert told == sorted(told)
    assert t_ns(0) <= told[0] < t_ns(FRAMES - 1) <= told[-1]
    assert [message.data for message in words] == ["kept"]
    assert re.search(r"played 11 messages in \d+\.\d s", printed())


def test_given_a_paused_player_when_asked_then_it_plays_the_log_and_once_more(graph, play, log):
    frames = graph.listen("/frame", PointStamped)
    process, printed = play(log, "--pause", "--loop", "--topics", "/frame", "--wait-for-subscribers", "60")
    for name in ("pause", "resume"):
        graph.client(Trigger, f"/player/{name}")
    graph.acquaint(Trigger, "/player/pause", Trigger.Request())  # what it is already
    graph.wait_for(lambda: "paused" in printed(), lambda: f"the line that says so; it printed {printed()}")
    assert trigger(graph, "pause") == (True, "paused")  # messages that went out before have come by now
    assert frames == []
    assert trigger(graph, "resume") == (True, "playing")
    graph.wait_for(lambda: len(frames) > 2 * FRAMES, "the second round")
    numbers = [int(message.header.frame_id.split()[1]) for message in frames]
    assert numbers == [number % FRAMES for number in range(len(numbers))]
    process.send_signal(signal.SIGINT)
    assert ended(graph, process) == 0
    assert re.search(r"interrupted\nplayed \d+ messages in \d+ rounds in ", printed())


def test_given_a_node_of_other_topics_when_waited_for_then_the_remap_that_would_help_is_named(
    graph, stranger, play, log
):
    stranger.create_subscription(PointStamped, "/wanted/point", print, 1)
    process, printed = play(log, "--topics", "/frame,/word", "--wait-for-node", "stranger")
    hint = "it takes /wanted/point (geometry_msgs/msg/PointStamped), which nothing publishes: play with"
    graph.wait_for(lambda: f"{hint} `--remap /frame:=/wanted/point`" in printed(), "the remap")
    assert "is_not_there" not in printed()
    process.send_signal(signal.SIGINT)
    ended(graph, process)
    assert "played 0 messages" in printed()
    process, printed = play(log, "--wait-for-node", "/is_not_there")
    graph.wait_for(
        lambda: "waiting for /is_not_there: no node of this name is in ROS_DOMAIN_ID" in printed(), "it"
    )
    process.send_signal(signal.SIGINT)
    ended(graph, process)


def test_given_topics_without_a_type_here_when_played_then_they_are_left_out_and_named(graph, play, log):
    process, printed = play(log, "--pause", "--wait-for-subscribers", "0.1")
    (publisher,) = graph.wait_for(lambda: graph.node.get_publishers_info_by_topic("/word"), "the player")
    assert publisher.qos_profile.durability is DurabilityPolicy.TRANSIENT_LOCAL  # as the log says
    graph.wait_for(lambda: "no node subscribes to " in printed(), "the end of the wait")
    process.send_signal(signal.SIGTERM)
    assert ended(graph, process) == 0
    assert (
        "/strange is left out: message type 'nowhere_msgs/msg/Strange' cannot be used with rclpy"
        in printed()
    )
    process, printed = play(log, "--topics", "/strange")
    assert ended(graph, process) == 2
    assert printed().startswith("torchperf: /strange is left out: ")
    assert len(printed().splitlines()) == 1


def test_given_a_log_that_breaks_off_then_what_is_left_goes_out_and_the_status_says_so(
    graph, play, log, tmp_path
):
    (whole,) = log.glob("*.mcap")
    cut = tmp_path / "cut.mcap"
    data = whole.read_bytes()
    cut.write_bytes(data[: data.index(b"frame 7")])
    process, printed = play(cut, "--topics", "/frame")
    assert ended(graph, process) == 1
    assert "cut.mcap: the chunk at offset " in printed()
    assert "played 7 messages in " in printed()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--topics", "/no"], "has no topic /no; it has: /frame, /strange, /word"),
        (["--start", "100", "--topics", "/frame"], "has no message of /frame in this part of it"),
        (["--remap", "/no:=/b"], "has no topic /no; it has: /frame, /strange, /word"),
        (["--remap", "/frame"], "--remap '/frame': has to be /A:=/B"),
        (["--remap", "/frame:=/b", "--remap", "/frame:=/c"], "/frame is /b already"),
        (["--remap", "/frame:=/b c"], "topic '/b c' is not allowed: "),
        (
            ["--remap", "/frame:=/word"],
            f"/frame ({POINT}) and /word ({STRING}) cannot both be published as /word: ",
        ),
        (["--remap", "/frame:=word"], "cannot both be published as /word: "),
    ],
)
def test_given_input_that_cannot_be_used_when_played_then_one_line_says_what_would_do(
    capfd, monkeypatch, graph, log, options, says
):
    monkeypatch.setenv("ROS_DOMAIN_ID", str(graph.node.context.get_domain_id()))
    result = CliRunner().invoke(app, ["play", str(log), *options])
    assert result.exit_code == 2
    (line,) = [  # Fast DDS may complain of participants that others have ended
        line
        for line in (result.stderr + capfd.readouterr().err).splitlines()
        if "left out" not in line and "RTPS_" not in line
    ]
    assert line.startswith("torchperf: ")
    assert says in line
