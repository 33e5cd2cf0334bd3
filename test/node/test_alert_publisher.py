"""When what is found is recorded and logged, without a graph: time is passed in."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("rclpy")

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.node import alert_publisher
from torchperf_ros.node.alert_publisher import AlertPublisher, NodeLog, stacks
from torchperf_ros.node.reporter import Reporter, Sources
from torchperf_ros.workers.protocol import STACK_FILE

from ..stage.conftest import _adapters_can_be_imported_by_workers, start_streams  # noqa: F401


class RecordingByHand:
    """Notes which incidents were asked for."""

    def __init__(self):
        self.recorded, self.messages, self.status = [], [], {}
        self.restarts, self.cut, self.problem = 0, 0, ""

    def unable(self):
        return ""

    def incident(self, what, now_ns):
        return f"{now_ns // NS_PER_S}_{what}"

    def evidence_path(self, name):
        return f"/evidence/{name}"

    def record(self, name, why, t_ns, stacks):
        self.recorded.append(name)

    def step(self):
        return []

    def message(self, topic, t_ns, data):
        self.messages.append((topic, data))

    def event(self, t_ns, **fields):
        pass


LINES = []


class Lines:
    """What a logger prints, with its severity."""

    def __init__(self, severity):
        self.severity = severity

    def __call__(self, text):
        LINES.append((self.severity, text))


@pytest.fixture
def announced(monkeypatch):
    """An alert publisher.

    `at(second, name)` finds something in that second, and returns the paths of incidents.
    """
    node = SimpleNamespace(
        create_publisher=lambda *_: SimpleNamespace(publish=lambda data: None, topic_name="/perf/anomaly"),
        get_fully_qualified_name=lambda: "/perf",
        get_logger=lambda: SimpleNamespace(
            **{level: Lines(level) for level in ("info", "warning", "error")}
        ),
    )
    LINES.clear()
    made = AlertPublisher(node)
    made.recording = RecordingByHand()
    found = []
    made.published = found.append

    def at(second, *names):
        now_ns = (1_000 + second) * NS_PER_S
        monkeypatch.setattr(alert_publisher, "monotonic_ns", lambda: now_ns)
        for name in names:
            made.found(Alert(Level.ERROR, name, "why"))
        found.clear()
        made.step(now_ns, now_ns, [])
        return {
            anomaly.name: anomaly.values["evidence"] for anomaly in found if anomaly.level is Level.ERROR
        }

    return SimpleNamespace(at=at, recording=made.recording, publisher=made, found=found)


def test_given_an_error_that_goes_on_when_reminded_of_then_it_is_recorded_once_and_each_reminder_names_it(
    announced,
):
    told = [paths for second in range(3600) if (paths := announced.at(second, "camera: input stopped"))]
    assert len(told) > 50
    assert announced.recording.recorded == ["1000_camera: input stopped"]
    assert {path for paths in told for path in paths.values()} == {"/evidence/1000_camera: input stopped"}


def test_given_another_error_meanwhile_when_a_minute_has_passed_then_that_is_recorded_too(announced):
    for second in range(200):
        announced.at(second, "camera: input stopped", *(["plan: misses"] if second >= 100 else []))
    assert announced.recording.recorded == ["1000_camera: input stopped", "1100_plan: misses"]


def test_given_an_alert_that_lasts_when_logged_then_the_terminal_has_its_begin_and_its_end(announced):
    for second in range(0, 200, 2):
        announced.at(second, "perception: model error", "perception: misses")
    assert LINES == [
        ("error", "perception: model error: why (with it: perception: misses)"),
        ("info", "evidence is written to /evidence/1000_perception: model error: why"),
    ]
    del LINES[1]
    for second in range(200, 215):
        announced.at(second)
    over = ["perception: model error: over", "perception: misses: over"]
    assert [
        (severity, text.partition(" (")[0].partition(": found")[0]) for severity, text in LINES[1:]
    ] == [("info", text) for text in over]
    announced.at(300, "perception: model error")
    assert [severity for severity, _ in LINES] == ["error", "info", "info", "error", "info"]
    assert LINES[-1][1].startswith("evidence is written to /evidence/1300_")


class Log(NodeLog):
    """Without a node; time in seconds."""

    def __init__(self):
        self.now_s, self.lines = 0.0, []
        logger = SimpleNamespace(info=self.lines.append)
        node = SimpleNamespace(get_logger=lambda: logger)
        super().__init__(node, SimpleNamespace(recording=None), lambda: round(self.now_s * NS_PER_S))


def test_given_a_storm_when_logged_then_it_is_cut_and_what_was_left_out_is_said_with_the_next():
    log = Log()
    for number in range(100):
        log("info", str(number))
    assert log.lines == [str(number) for number in range(30)]
    log.now_s = 1.0
    log("info", "after")
    log("info", "then")
    assert "70 lines were left out" in log.lines[30]
    assert log.lines[31:] == ["after", "then"]


def test_given_a_storm_that_lasts_when_logged_then_ten_lines_a_second_remain():
    log = Log()
    for number in range(10_000):  # 100 a second for 100 s
        log.now_s = number / 100
        log("info", "x")
    assert abs(log.lines.count("x") - (30 + 10 * 100)) <= 1


def test_given_a_report_that_goes_on_when_the_stages_are_to_stop_then_they_wait_for_its_end(
    stranger, monkeypatch
):
    reporter = Reporter(stranger, AlertPublisher(stranger), lambda: "active", lambda stage: {}, lambda: 0)
    begun, may_end, is_over = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def report():
        begun.set()
        may_end.wait(60.0)
        seen.append(reporter.sources.facts)

    monkeypatch.setattr(reporter, "report", report)
    monkeypatch.setattr("torchperf_ros.node.reporter._EVERY_S", 0.01)
    reporter.note(stage="there")
    reporter.start()
    assert begun.wait(60.0)
    threading.Thread(target=lambda: (reporter.forget(), is_over.set()), daemon=True).start()
    assert not is_over.wait(0.2)
    monkeypatch.setattr(reporter, "report", lambda: None)
    may_end.set()
    assert is_over.wait(60.0)
    assert seen[0] == {"stage": "there"}
    assert reporter.sources == Sources()
    reporter.stop()


def test_given_a_process_without_descriptors_when_reported_then_the_rest_is_said_and_memory_is_as_it_was(
    stranger, limited
):
    publisher = AlertPublisher(stranger)
    publisher.recording = RecordingByHand()
    reporter = Reporter(stranger, publisher, lambda: "active", lambda stage: {}, lambda: 0)
    reporter.report()
    spare = os.open("/dev/null", os.O_RDONLY)  # the lowest that is free
    os.close(spare)
    with limited("NOFILE", spare):
        reporter.report()
    reporter.report()
    heard = [data for topic, data in publisher.recording.messages if topic == "/diagnostics"]
    warned = [b"memory in use cannot be read: [Errno 24] Too many open files" in data for data in heard]
    assert warned == [False, True, False]


def test_given_a_warning_that_becomes_another_when_reported_then_each_is_logged_once(stranger, monkeypatch):
    reporter = Reporter(stranger, AlertPublisher(stranger), lambda: "active", lambda stage: {}, lambda: 0)
    logged = []
    monkeypatch.setattr(type(stranger.get_logger()), "warning", lambda _, text: logged.append(text))
    silent, full = (
        "the recorder has made no progress for {} s (sleeping)",
        "records cannot be written to /full",
    )
    for text in (silent.format(5), silent.format(6), full, full):
        reporter.note(recorder_warning=text)
        reporter.report()
    assert logged == [silent.format(5), full]


@pytest.mark.parametrize("name", ["machine: memory", "machine: gpu memory"])
def test_given_a_worker_that_leaks_when_the_machines_memory_runs_out_then_the_alert_names_it(
    announced, name
):
    left = {
        "level": "WARN",
        "name": name,
        "message": "4.9% of the memory is left",
        "values": {"value": "4.9"},
    }
    announced.recording.step = lambda: [left, {**left, "name": "machine: load"}]
    announced.publisher.takes_memory = "the most is perception's", {"stage": "perception", "pid": "8"}
    announced.at(0)
    said = {alert.name: alert for alert in announced.found}
    assert said[name].message == "4.9% of the memory is left; the most is perception's"
    assert [said[name].values[key] for key in ("value", "stage", "pid")] == ["4.9", "perception", "8"]
    assert "stage" not in said["machine: load"].values
    assert any("the most is perception's" in text for _, text in LINES)


def test_given_streams_when_asked_for_stacks_then_each_worker_answers_once_and_forgets_what_it_wrote_before(
    start_streams,  # noqa: F811
):
    streams = start_streams("left", "right", backup="none")
    (worker,) = streams[0].actor.pool.everyone
    file = Path(worker.folder, STACK_FILE)
    file.write_text("those of before")
    assert stacks([stream.actor for stream in streams]).count(f"(pid {worker.pid})") == 1
    assert "those of before" not in file.read_text()
