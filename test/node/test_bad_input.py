"""Bad input of each kind: the node says what is wrong, counts it, and goes on answering what is right."""

import math
import os
import signal
import socket
import time
import urllib.request

import pytest

pytest.importorskip("rclpy")

from nav_msgs.msg import Odometry
from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from benchmarks.rig.scraper import free_port
from torchperf_ros.api.outcome import Fallback, Outcome

PERCEPTION, PLANNING, LARGE = 0, 1, 4
HOUR_NS = 3_600 * 1_000_000_000


class Car:
    """A node whose two stages do not know each other: each shows whether the other's trouble reaches it."""

    def __init__(self, graph, start_node, fast):
        stage = fast(max_frame_bytes=65_536, sustained_misses=1)
        self.metrics_port = free_port()
        stages = {"perception": {**stage, "output": "boxes"}, "planning": stage}
        self.node = start_node({**stages, "metrics_port": self.metrics_port})
        self.node.wait_until_ready("perception", "planning")
        self.camera = self.node.publisher("image", Image)
        self.detections = self.node.publisher("detections", MarkerArray)
        self.odom = self.node.publisher("odom", Odometry)

    def plans(self):
        """Whether planning answers a frame from its own result, on time."""
        return self.node.answer(self.detections, MarkerArray(), PLANNING)["outcome"] == Outcome.ON_TIME

    def sees(self, message):
        """Whether perception answers this image from its own result, on time."""
        return self.node.answer(self.camera, message)["outcome"] == Outcome.ON_TIME

    def reasons(self, name):
        """The messages on ~/anomaly under this name."""
        return [
            status.message
            for array in self.node.anomalies
            for status in array.status
            if status.name == name
        ]


@pytest.fixture(scope="module")
def car(graph, start_node, fast, image):
    car = Car(graph, start_node, fast)
    assert car.sees(image())
    return car


BAD_IMAGES = {
    "unknown encoding": {"encoding": "yuv422_yuy2"},
    "zero-sized": {"width": 0, "height": 0},
    "data shorter than its rows": {"size": 100},
    "larger than max_frame_bytes": {"width": 200, "height": 200},
}


def test_given_a_bad_image_then_the_reason_is_told_as_an_anomaly(car, image):
    car.node.answer(car.camera, image(encoding="bayer_rggb8"))
    (why,) = car.node.wait_for(lambda: car.reasons("perception: bad input"), "the reason")
    assert "image encoding 'bayer_rggb8' is a Bayer pattern, debayer it first; supported: rgb8" in why


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_given_a_bad_image_then_it_is_refused_and_the_next_is_answered_as_is_the_other_stage(
    car, image, kind
):
    row = car.node.answer(car.camera, image(**BAD_IMAGES[kind]))
    assert Outcome(int(row["outcome"])) is Outcome.BAD_INPUT
    assert Fallback(int(row["fallback"])) in {Fallback.HOLD_LAST, Fallback.NONE}
    assert row["total_ms"] < row["budget_ms"]
    assert car.plans()
    assert car.sees(image())


def test_given_bytes_that_are_no_image_then_they_are_refused_and_the_next_image_is_answered(car, image):
    for garbage in (b"\x00\x01\x00\x00" + b"\xff" * 300, b"\x00\x01\x00\x00", b"\xff" * 5):
        before = len(car.node.rows_of(PERCEPTION))
        car.camera.publish(garbage)
        car.node.wait_for(
            lambda before=before: len(car.node.rows_of(PERCEPTION)) > before, "a row for garbage"
        )
        assert car.node.rows_of(PERCEPTION)[-1]["outcome"] == Outcome.BAD_INPUT, garbage
        assert car.plans()
        assert car.sees(image())


def test_given_refused_images_then_diagnostics_count_them_and_the_other_stage_is_untouched(car, image):
    assert int(car.node.counted("perception", bad_input=1)["bad_input"]) >= 1
    bad = sum(row["outcome"] == Outcome.BAD_INPUT for row in car.node.rows_of(PERCEPTION))
    values = car.node.counted("perception", bad_input=bad)
    assert (int(values["bad_input"]), values["internal_errors"], values["restarts"]) == (bad, "0", "0")
    values = car.node.values("planning")
    assert (values["bad_input"], values["restarts"]) == ("0", "0")


def test_given_nan_odometry_then_planning_refuses_it_until_a_good_one_comes(car, image):
    bad = Odometry()
    bad.pose.pose.orientation.w = 1.0
    bad.twist.twist.linear.x = math.nan
    car.odom.publish(bad)
    car.node.wait_for(lambda: not car.plans(), "planning to refuse NaN")
    assert car.node.rows_of(PLANNING)[-1]["outcome"] == Outcome.BAD_INPUT
    assert car.sees(image())
    (why,) = car.node.wait_for(lambda: car.reasons("planning: bad input"), "the reason")
    assert "odom.twist.twist.linear.x is nan" in why

    bad.twist.twist.linear.x = 1.0
    car.odom.publish(bad)
    car.node.wait_for(car.plans, "planning to go on")


def test_given_odd_stamps_then_each_kind_is_counted_and_the_images_are_answered(car, image):
    before = car.node.values("perception")
    now_ns = time.time_ns()
    odd = {
        "zero_stamps": 0,
        "future_stamps": now_ns + HOUR_NS,
        "backward_stamps": now_ns,
        "repeated_stamps": now_ns,
    }
    for stamp in odd.values():
        assert car.sees(image(stamp))
    values = car.node.counted("perception", frames=len(car.node.rows_of(PERCEPTION)))
    assert {name: int(values[name]) - int(before[name]) for name in odd} == dict.fromkeys(odd, 1)
    assert math.isnan(car.node.rows_of(PERCEPTION)[-4]["age_ms"])
    assert car.node.rows_of(PERCEPTION)[-3]["age_ms"] == pytest.approx(-HOUR_NS / 1e6, abs=60_000.0)


def test_given_input_that_stops_when_it_comes_back_then_the_stage_waits_and_recovers(car, image):
    car.node.wait_for(
        lambda: "input stopped" in car.node.statuses["perf: perception"][1], "perception to wait"
    )
    assert car.node.values("perception")["health"] == "WAITING"
    car.node.wait_for(lambda: "/image for 5 s: " in car.node.errors, "the terminal to say so")
    for said in ("active: answers /", "stage perception is ready: fast, ", "publishes it: it has stopped"):
        car.node.prints(said)
    car.node.wait_for(
        lambda: car.sees(image()) and car.node.values("perception")["health"] == "NOMINAL",
        "perception to recover",
    )
    level, _, _ = car.node.statuses["perf: perception"]
    assert level == 0


def test_given_a_free_metrics_port_then_the_counters_can_be_scraped(car):
    car.node.counted("perception", frames=len(car.node.rows_of(PERCEPTION)))
    car.node.counted("planning", frames=len(car.node.rows_of(PLANNING)))
    with urllib.request.urlopen(f"http://127.0.0.1:{car.metrics_port}/metrics", timeout=200) as answer:
        text = answer.read().decode()
    assert f'torchperf_frames_total{{stage="perception"}} {len(car.node.rows_of(PERCEPTION))}.0' in text
    on_time = sum(row["outcome"] == Outcome.ON_TIME for row in car.node.rows_of(PLANNING))
    assert f'torchperf_answers_total{{outcome="on_time",stage="planning"}} {on_time}.0' in text
    assert 'torchperf_health{stage="perception",state="' in text


def test_given_the_node_then_after_all_that_nothing_was_lost_or_restarted(car):
    car.node.next_report()
    for stage in ("perception", "planning"):
        values = car.node.values(stage)
        assert (values["internal_errors"], values["restarts"]) == ("0", "0")
        counted = sum(int(values[key]) for key in ("answered", "unanswered", "superseded"))
        assert counted == int(values["frames"])
    assert "Traceback" not in car.node.errors


# -- adapters that cannot be used


UNUSABLE = {
    "missing": "adapters_for_graph has no Adapter class 'Missing'; it has ['Obedient', ",
    "unimportable": (
        "importing adapter_not_importable failed: ImportError: the camera's driver is not installed"
    ),
    "unbuildable": "RuntimeError: no weights for fast",
}


@pytest.fixture(scope="module")
def pool(start_node, obedient, tmp_path_factory):
    """Two good stages among three that fail in their own way.

    A metrics port that is taken, and a full disk.
    """
    evidence, modules = tmp_path_factory.mktemp("evidence"), tmp_path_factory.mktemp("modules")
    namespace = f"/full{os.getpid()}"
    records = evidence / "records" / namespace[1:] / "perf"
    records.mkdir(parents=True)
    (records / "records.jsonl").symlink_to("/dev/full")
    (modules / "adapter_not_importable.py").write_text(
        'raise ImportError("the camera\'s driver is not installed")\n'
    )
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        node = start_node(
            {
                "stages": ["good", "missing", "unimportable", "unbuildable", "large"],
                "metrics_port": taken.getsockname()[1],
                "recorder": True,
                "evidence_dir": str(evidence),
                "good": obedient(input_timeout_ms=600_000.0),
                "missing": obedient(adapter="Missing", output="a"),
                "unimportable": {**obedient(output="b"), "adapter": "adapter_not_importable:Camera"},
                "unbuildable": obedient(adapter="Unbuildable", output="c", trigger="other"),
                "large": obedient(
                    adapter="FiveInputs", output="d", trigger="first", max_frame_bytes=100_000
                ),
            },
            namespace=namespace,
        )
        node.wait_until_ready("good", "large")
        yield node, taken.getsockname()[1]


def test_given_adapters_that_cannot_be_used_then_each_says_why_on_diagnostics_and_in_the_log(pool):
    node, _ = pool
    for stage, why in UNUSABLE.items():
        values = node.wait_for_health(stage, "SAFE_STOP")
        level, text, _ = node.statuses[f"perf: {stage}"]
        assert level == 2
        assert text.startswith("SAFE_STOP: ")
        assert why in text
        assert why in values["last_error"]
        node.wait_for(lambda why=why: why in node.errors, f"the log to say {why}")
    assert "Traceback" in node.values("unbuildable")["last_error"]
    assert "in build" in node.values("unbuildable")["last_error"]
    node.wait_for(
        lambda: "stage good is ready: fast, each frame within 5000 ms" in node.errors, "the good one"
    )
    assert not any(f"stage {stage} is ready" in node.errors for stage in UNUSABLE)


def test_given_stages_that_failed_then_the_good_one_is_answered_on_time(pool, image):
    node, _ = pool
    camera = node.publisher("image", Image)
    rows = [node.answer(camera, image()) for _ in range(10)]
    assert [row["outcome"] for row in rows] == [Outcome.ON_TIME] * 10
    node.wait_for(lambda: node.values("node")["lifecycle"] == "active", "diagnostics to say active")


def test_given_inputs_that_together_are_too_large_then_frames_are_refused_until_they_fit(pool, image):
    node, _ = pool
    large, small = image(width=184, height=180), image()  # alone it fits
    camera = node.publisher("first", Image)
    others = [node.publisher(f"image_{number}", Image) for number in range(1, 5)]

    def outcome():
        return node.answer(camera, large, stage=LARGE)["outcome"]

    assert outcome() == Outcome.ON_TIME
    for messages, expected in ((large, Outcome.BAD_INPUT), (small, Outcome.ON_TIME)):
        for other in others:
            other.publish(messages)
        node.wait_for(lambda expected=expected: outcome() == expected, f"outcome {expected}")


def test_given_a_port_that_is_taken_and_a_full_disk_then_the_node_warns_of_each_once_and_goes_on(pool):
    node, port = pool
    said = {
        "metrics_warning": (f"metrics_port {port} cannot be used: ", "set another, or 0 for none"),
        "recorder_warning": ("records cannot be written to ", "No space left on device"),
    }
    for key, (begin, end) in said.items():
        # On a busy machine the recorder may first have been silent for a while, which is a warning as well.
        warning = node.wait_for(
            lambda key=key, begin=begin: next(
                filter(lambda text: text.startswith(begin), [node.values("node").get(key, "")]), ""
            ),
            f"the {key} on diagnostics",
        )
        assert end in warning
        node.wait_for(lambda begin=begin: begin in node.errors, f"the {key} in the log")
    node.next_report()
    assert [node.errors.count(begin) for begin, _ in said.values()] == [1, 1]


# -- the graph around it


def test_given_two_nodes_with_one_name_then_both_warn_on_diagnostics_and_once_in_the_log(start_node):
    name = f"/twins{os.getpid()}"
    # The first one says that it goes, as no fork does.
    twins = [start_node({"autostart": False}, namespace=name, cold=cold) for cold in (True, False)]
    text = f"2 nodes are called {name}/perf; give each its own name or namespace"
    for twin in twins:
        twin.wait_for(lambda twin=twin: twin.errors.count(text) == 1, "a warning in the log")
        twin.wait_for(
            lambda twin=twin: twin.values("node").get("name_warning") == text, "a warning on /diagnostics"
        )
        twin.next_report()
        assert twin.errors.count(text) == 1
    assert twins[0].end(signal.SIGINT) == 0
    twins[1].wait_for(lambda: "name_warning" not in twins[1].values("node"), "the warning to go")
