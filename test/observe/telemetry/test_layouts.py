"""The layouts for rqt, PlotJuggler and Foxglove can be read, and all that they name is published."""

import ast
import glob
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from torchperf_ros.api.outcome import Health
from torchperf_ros.observe.telemetry import memory, rows
from torchperf_ros.observe.telemetry.diagnostics import stage_status
from torchperf_ros.settings.config import STAGE_DEFAULTS

CONFIG = Path(__file__).parents[3] / "config"
LENGTHS = {"/perf/latency_stages": len(rows.LABELS), "/perf/memory_stats": len(memory.LABELS)}
STATUS = re.compile(r'/diagnostics\.status\[:\]\{name=="perf: (\w+)"\}\.values\[:\]\{key=="(\w+)"\}\.value')


def exists(topic: str, field: str) -> bool:
    """Whether a field is published, as `data` or `data[3]`."""
    if topic in {"/perf/latency", "/perf/memory"}:
        return field == "data"
    index = re.fullmatch(r"data\[(\d+)\]", field)
    return topic in LENGTHS and index is not None and int(index[1]) < LENGTHS[topic]


def stored(group: dict):
    """Every stored value of a group and those below, by key; as qt_gui reads them."""
    for key, value in group["keys"].items():
        yield key, ast.literal_eval(value["repr"])
    for below in group["groups"].values():
        yield from stored(below)


def test_given_the_perspective_of_rqt_when_its_plots_are_read_then_their_topics_exist():
    perspective = json.loads((CONFIG / "rqt/torchperf.perspective").read_text())
    topics = [topic for key, value in stored(perspective) if key == "topics" for topic in value]
    assert len(topics) >= 3
    assert [topic for topic in topics if not exists(*topic.rsplit("/", 1))] == []


def test_given_the_layout_of_plotjuggler_when_read_then_every_curve_is_published_or_computed_from_its_row():
    root = ET.parse(CONFIG / "plotjuggler/torchperf.xml").getroot()
    snippets = list(root.iterfind("customMathEquations/snippet"))
    computed = {snippet.get("name") for snippet in snippets}
    curves = [curve.get("name") for curve in root.iter("curve")]
    assert computed
    assert computed <= set(curves)
    assert [name for name in curves if name not in computed and not exists(*name.rsplit("/", 1))] == []
    for snippet in snippets:
        stage, label = re.fullmatch(r"stage_(\d)/(\w+)", snippet.get("name")).groups()
        entry = f"data[{rows.LABELS.index(label)}]"
        assert snippet.findtext("linked_source") == f"/perf/latency_stages/{entry}"
        assert f"v1 == {stage}" in snippet.findtext("function")


def test_given_the_layout_of_foxglove_when_its_paths_are_read_then_each_is_published(
    make_stage, make_worker
):
    panels = json.loads((CONFIG / "foxglove/torchperf.json").read_text())["configById"].values()
    paths = [path["value"] for panel in panels for path in panel.get("paths", ())]
    values = stage_status(make_stage(workers=(make_worker(), None)), Health.NOMINAL, {}).values
    assert len(paths) > 10
    for path in paths:
        if status := STATUS.fullmatch(path):
            assert (status[1] in STAGE_DEFAULTS, status[2] in values) == (True, True), path
        else:
            assert exists(*path.rsplit(".", 1)), path
    shown = [panel[key] for panel in panels for key in ("topicPath", "topicToRender") if key in panel]
    assert {path.partition(".")[0] for path in shown} == {"/diagnostics", "/perf/anomaly"}


def test_given_the_package_when_installed_then_the_layouts_come_along(monkeypatch):
    import setuptools

    monkeypatch.chdir(CONFIG.parent)
    asked = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: asked.update(arguments))
    exec(compile(Path("setup.py").read_text(encoding="utf-8"), "setup.py", "exec"), {})
    for tool in ("rqt", "plotjuggler", "foxglove"):
        assert (f"share/torchperf_ros/config/{tool}", glob.glob(f"config/{tool}/*")) in asked["data_files"]
