"""The layouts for rqt, PlotJuggler and Foxglove.

They can be read, and everything that they name is published.
"""

import ast
import glob
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from torchperf_ros.api.outcome import Health
from torchperf_ros.observe.telemetry import latency_record, memory
from torchperf_ros.observe.telemetry.diagnostics import stage_status
from torchperf_ros.settings.config import STAGE_DEFAULTS

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "config"
LENGTHS = {"/perf/latency_stages": len(latency_record.LABELS), "/perf/memory_stats": len(memory.LABELS)}
NUMBERS = {"/perf/latency", "/perf/memory"}
ARRAYS = {"/diagnostics", "/perf/anomaly"}


def exists(topic: str, field: str) -> bool:
    """Whether a field is published, as `data` or `data[3]`."""
    if topic in NUMBERS:
        return field == "data"
    index = re.fullmatch(r"data\[(\d+)\]", field)
    return topic in LENGTHS and index is not None and int(index[1]) < LENGTHS[topic]


# -- rqt


def perspective() -> dict:
    return json.loads((CONFIG / "rqt/torchperf.perspective").read_text())


def values(group: dict):
    """Every stored value of a group and those below, by key; as qt_gui reads them."""
    for key, stored in group["keys"].items():
        assert stored["type"] == "repr"
        yield key, ast.literal_eval(stored["repr"])
    for below in group["groups"].values():
        yield from values(below)


def test_given_the_perspective_when_read_then_every_plugin_that_has_settings_runs():
    manager = perspective()["groups"]["pluginmanager"]
    running = dict(values(manager))["running-plugins"]
    known = {
        f"plugin__{name.replace('/', '__')}__{number}"
        for name, numbers in running.items()
        for number in numbers
    }
    assert set(manager["groups"]) <= known
    assert "rqt_plot/Plot" in running


def test_given_the_perspective_when_its_plots_are_read_then_their_topics_exist():
    topics = [topic for key, value in values(perspective()) if key == "topics" for topic in value]
    assert len(topics) >= 3
    assert [topic for topic in topics if not exists(*topic.rsplit("/", 1))] == []


# -- PlotJuggler


def juggler() -> ET.Element:
    return ET.parse(CONFIG / "plotjuggler/torchperf.xml").getroot()


def test_given_the_plotjuggler_layout_when_read_then_every_curve_is_published_or_computed_there():
    root = juggler()
    computed = {snippet.get("name") for snippet in root.iterfind("customMathEquations/snippet")}
    curves = [curve.get("name") for curve in root.iter("curve")]
    assert len(curves) > 15
    assert [name for name in curves if name not in computed and not exists(*name.rsplit("/", 1))] == []
    assert computed <= set(curves)


def test_given_the_plotjuggler_layout_when_its_series_are_computed_then_from_the_row_that_they_are_named_after():
    snippets = list(juggler().iterfind("customMathEquations/snippet"))
    assert snippets
    for snippet in snippets:
        stage, label = re.fullmatch(r"stage_(\d)/(\w+)", snippet.get("name")).groups()
        assert (
            snippet.findtext("linked_source")
            == f"/perf/latency_stages/data[{latency_record.LABELS.index(label)}]"
        )
        assert snippet.findtext("additional_sources/v1") == "/perf/latency_stages/data[0]"
        assert f"v1 == {stage}" in snippet.findtext("function")


def test_given_the_plotjuggler_layout_when_streamed_then_the_topics_of_its_curves_are_subscribed():
    root = juggler()
    subscribed = {topic.get("name") for topic in root.iterfind("Plugins/plugin/selected_topics/topic")}
    sources = [element.text for tag in ("linked_source", "v1") for element in root.iter(tag)]
    sources += [curve.get("name") for curve in root.iter("curve") if curve.get("name").startswith("/")]
    assert {name.rsplit("/", 1)[0] for name in sources} == subscribed


# -- Foxglove

STATUS = re.compile(r'/diagnostics\.status\[:\]\{name=="perf: (\w+)"\}\.values\[:\]\{key=="(\w+)"\}\.value')


def foxglove() -> dict:
    return json.loads((CONFIG / "foxglove/torchperf.json").read_text())


def panels_of(layout) -> list[str]:
    if isinstance(layout, str):
        return [layout]
    assert layout["direction"] in {"row", "column"}
    return panels_of(layout["first"]) + panels_of(layout["second"])


def test_given_the_foxglove_layout_when_read_then_every_panel_is_placed_once():
    layout = foxglove()
    assert sorted(panels_of(layout["layout"])) == sorted(layout["configById"])


def test_given_the_foxglove_layout_when_its_paths_are_read_then_each_is_published(make_stage, make_worker):
    panels = foxglove()["configById"].values()
    paths = [path["value"] for panel in panels for path in panel.get("paths", ())]
    assert len(paths) > 10
    told = stage_status(make_stage(workers=(make_worker(), None)), Health.NOMINAL, {}).values
    for path in paths:
        if status := STATUS.fullmatch(path):
            assert status[1] in STAGE_DEFAULTS
            assert status[2] in told
        else:
            assert exists(*path.rsplit(".", 1)), path
    shown = [panel[key] for panel in panels for key in ("topicPath", "topicToRender") if key in panel]
    assert {path.partition(".")[0] for path in shown} == ARRAYS


# -- installation


@pytest.mark.parametrize("tool", ["rqt", "plotjuggler", "foxglove"])
def test_given_the_package_when_installed_then_the_layouts_come_along(tool, monkeypatch):
    import setuptools

    monkeypatch.chdir(ROOT)
    told = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: told.update(arguments))
    exec(compile((ROOT / "setup.py").read_text(encoding="utf-8"), "setup.py", "exec"), {})
    assert (f"share/torchperf_ros/config/{tool}", glob.glob(f"config/{tool}/*")) in told["data_files"]
