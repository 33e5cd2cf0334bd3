"""A real node, scraped by a real Prometheus with the example's configuration.

Every query of the dashboard has data.
"""

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("rclpy")

from sensor_msgs.msg import Image

from benchmarks.rig.scraper import free_port
from torchperf_ros.observe.telemetry.diagnostics import METRICS

pytestmark = [
    pytest.mark.ros,
    pytest.mark.skipif(
        not shutil.which("prometheus"), reason="Debian's package prometheus is not installed"
    ),
]

CONFIG = Path(__file__).resolve().parents[2] / "config"
DASHBOARD = json.loads((CONFIG / "grafana/torchperf.json").read_text(encoding="utf-8"))
TARGETS = [
    pytest.param(panel, target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]
SCRAPES = 5
ONLY_ELSEWHERE = {  # on CUDA, with a guard, with synchronised inputs, with a candidate
    "torchperf_cuda_memory_bytes",
    "torchperf_guard_verdicts_total",
    "torchperf_input_frames_total",
    "torchperf_input_waits_total",
    "torchperf_input_wait_seconds_total",
    "torchperf_input_skew_seconds",
    "torchperf_version_info",
    "torchperf_version_pairs_total",
    "torchperf_version_difference_seconds",
    "torchperf_version_score",
}


class Server:
    """Prometheus as the example configures it, but for the port of the node and the interval."""

    def __init__(self, folder, node_port):
        text = (CONFIG / "prometheus/prometheus.yaml").read_text(encoding="utf-8")
        text = text.replace("9464", str(node_port)).replace("interval: 5s", "interval: 300ms")
        (folder / "prometheus.yaml").write_text(text, encoding="utf-8")
        shutil.copy(CONFIG / "prometheus/torchperf_rules.yaml", folder)
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = folder / "log"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def get(self, path, **arguments):
        """The data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=200) as reply:
            return json.load(reply)["data"]

    def values(self, expression):
        """Labels and value of each series of an instant query, NaN ones left out."""
        found = self.get("query", query=expression)["result"]
        return [(one["metric"], value) for one in found if not math.isnan(value := float(one["value"][1]))]

    def scrapes(self):
        """How many scrapes of the node it has stored."""
        try:
            return max(
                (value for _, value in self.values('count_over_time(up{job="torchperf"}[5m])')), default=0
            )
        except urllib.error.URLError:
            assert self.process.poll() is None, self.log.read_text()
            return 0

    def end(self):
        self.process.terminate()
        self.process.wait(200)


class Drive:
    """A node and the server that scrapes it; images come at about 30 Hz while something is waited for."""

    def __init__(self, start_node, obedient, image, folder):
        port = free_port()
        self.node = start_node({"stages": ["perception"], "perception": obedient(), "metrics_port": port})
        self.node.wait_until_ready("perception")
        self._camera, self._image = self.node.publisher("image", Image), image
        self.server = Server(folder, port)

    def wait_for(self, condition, what):
        """What the condition says as soon as it is true."""

        def image_and_said():
            self._camera.publish(self._image())
            time.sleep(0.03)
            return condition()

        return self.node.wait_for(image_and_said, what)


@pytest.fixture(scope="module")
def drive(start_node, obedient, image, tmp_path_factory):
    """A drive of which Prometheus has seen enough."""
    drive = Drive(start_node, obedient, image, tmp_path_factory.mktemp("prometheus"))
    try:
        drive.wait_for(lambda: drive.server.scrapes() >= SCRAPES, f"{SCRAPES} scrapes")
        yield drive
    finally:
        drive.server.end()


@pytest.mark.parametrize(("panel", "expression"), TARGETS)
def test_given_a_panel_when_its_query_is_asked_of_the_server_then_there_is_data(drive, panel, expression):
    for variable, value in (("$__rate_interval", "30s"), ("$instance", ".*"), ("$stage", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    drive.wait_for(
        lambda: drive.server.values(expression), panel["title"]
    )  # a quantile needs images of late


def test_given_the_dashboards_variables_when_asked_then_they_have_values(drive):
    queries = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for query in queries:
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
        found = drive.server.values(series.replace("$instance", ".*"))
        assert all(labels[label] for labels, _ in found)
        assert found


def test_given_a_scraped_node_when_asked_then_every_metric_of_the_table_is_stored(drive):
    stored = set(drive.server.get("label/__name__/values"))
    for spec in METRICS:
        name = f"{spec.name}_bucket" if spec.kind == "histogram" else spec.name
        assert (name in stored) is (spec.name not in ONLY_ELSEWHERE), name


def test_given_a_scraped_node_when_no_more_images_come_then_the_server_counts_what_listeners_have_counted(
    drive,
):
    node, server = drive.node, drive.server
    counters = (
        "torchperf_answers_total",
        "torchperf_latency_seconds_count",
        "torchperf_lateness_seconds_count",
    )

    def all_agree():
        counts = [value for counter in counters for _, value in server.values(f"sum({counter})")]
        return counts == [len(node.rows_of(0))] * len(counters)

    assert node.rows_of(0)
    node.wait_for(all_agree, lambda: f"{counters} to be {len(node.rows_of(0))}")


def test_given_the_example_configuration_when_the_server_runs_then_target_and_rules_are_well(drive):
    server = drive.server

    def target_is_well():
        (target,) = server.get("targets")["activeTargets"]
        assert target["labels"]["job"] == "torchperf"
        return (target["health"], target["lastError"]) == ("up", "")

    drive.wait_for(
        target_is_well, lambda: f"the target to be well: {server.get('targets')['activeTargets']}"
    )
    (group,) = server.get("rules")["groups"]
    server_saw = {rule["name"]: (rule["health"], rule.get("lastError")) for rule in group["rules"]}
    assert {health for health, _ in server_saw.values()} <= {"ok"}, server_saw
    assert server.log.read_text() == ""
