"""The command: exit status, files, and one line for what cannot be done."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchperf_ros import cli

from .conftest import SAMPLES, breaking_line

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr("torchperf_ros.analysis.graph_capture._SECONDS", 0.0)
    monkeypatch.setattr(sys, "path", list(sys.path))


def inspect(name, *more):
    return RUNNER.invoke(cli.app, ["inspect", f"{SAMPLES}:{name}", "--input", "8x8", *map(str, more)])


def test_given_a_break_when_inspected_then_place_reason_advice_and_summary_are_shown():
    result = inspect("value_if_bad")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert f"graph_samples.py:{breaking_line('value_if_bad')} in value_if_bad" in text
    assert "branch on tensor values" in text
    assert "Data-dependent branching" in text
    assert "+ return torch.where(y.sum() > 0, y * 2, y * 3)" in text
    assert "2 graphs with 4 ops, 1 break; eager" in text
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("name", "allowed", "status", "word"),
    [("value_if_bad", 0, 1, "FAIL"), ("value_if_bad", 1, 0, "PASS"), ("value_if_good", 0, 0, "PASS")],
)
def test_given_a_number_of_breaks_allowed_when_inspected_then_the_exit_status_says_whether_it_holds(
    name, allowed, status, word
):
    result = inspect(name, "--max-breaks", allowed)
    assert result.exit_code == status
    assert f"{word}: " in result.stdout


def test_given_a_model_that_prints_when_inspected_then_its_words_are_not_shown():
    result = inspect("report_bad")
    assert "mean tensor" not in result.output


def test_given_json_when_inspected_then_it_holds_everything(tmp_path):
    result = inspect("value_if_bad", "--also", "4x8", "--json", tmp_path / "report.json", "--max-breaks", "0")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_status"] == result.exit_code == 1
    assert [graph["ops"] for graph in report["graphs"]] == [3, 1, 3, 1]
    found = report["breaks"][0]
    assert (found["file"], found["line"]) == (str(SAMPLES), breaking_line("value_if_bad"))
    assert found["category"] == "branch on tensor values"
    assert found["advice"]["is_users"]
    assert found["gap_ms"] > 0
    assert [item["kind"] for item in report["recompilations"]] == ["size", "size"]
    assert [item["shapes"] for item in report["inputs"]] == ["8x8:float32", "4x8:float32"]
    assert report["summary"] in " ".join(result.stdout.split())


def test_given_a_picture_when_inspected_then_it_is_an_svg_with_graphs_and_breaks_inside_its_frame(tmp_path):
    inspect("NormBad", "--also", "4x8", "--graph", tmp_path / "graphs.svg")
    root = ET.parse(tmp_path / "graphs.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    classes = [box.get("class") for box in root.iter(f"{space}rect")]
    assert classes.count("graph") == 6
    assert classes.count("break") == 2  # once for each input
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "break 1: branch on tensor values" in texts
    assert "batch_norm" in texts
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{space}rect"):
        assert float(box.get("x", 0)) + float(box.get("width")) <= width
        assert float(box.get("y", 0)) + float(box.get("height")) <= height


def test_given_a_folder_for_ir_when_inspected_then_an_index_links_every_file_with_size_and_explanation(tmp_path):
    folder = tmp_path / "ir"
    result = inspect("value_if_good", "--ir", folder)
    assert result.exit_code == 0, result.output
    page = (folder / "index.html").read_text()
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "index.html"]
    names = " ".join(path.name for path in files)
    for part in ("dynamo_output_graph", "dynamo_cpp_guards_str", "output_code", "ir_pre_fusion", "ir_post_fusion"):
        assert part in names
    for path in files:
        assert f'href="{path.relative_to(folder).as_posix()}"' in page
        assert f"{path.stat().st_size:,} B" in page
    assert "Not described here" not in page
    assert "backend inductor" in result.stdout
    again = inspect("value_if_good", "--ir", folder)
    assert again.exit_code == 2
    assert "not empty" in again.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--options", "{"], ["--options '{'", "JSON"]),
        (["--options", "[1]"], ["object"]),
        (["--backend", "indcutor"], ["'indcutor'", "inductor"]),
        (["--json", "no_such_folder/x.json"], ["--json no_such_folder/x.json", "existing folder"]),
        (["--graph", "no_such_folder/x.svg"], ["existing folder"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--device", "gpu"], ["gpu"]),
    ],
)
def test_given_a_value_that_cannot_be_used_when_run_then_one_line_names_it_and_the_status_is_2(more, words):
    result = inspect("value_if_good", *more)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("torchperf: ")
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_given_a_model_that_raises_anyway_when_run_then_its_own_words_and_the_inputs_are_named():
    result = inspect("raising")
    assert result.exit_code == 2
    assert "ValueError: the model's own words" in result.stderr
    assert "8x8:float32" in result.stderr


def test_given_help_when_asked_then_torch_is_not_loaded():
    program = """
import sys
from typer.testing import CliRunner
from torchperf_ros import cli
result = CliRunner().invoke(cli.app, ["inspect", "--help"])
assert result.exit_code == 0, result.output
assert "Example: torchperf inspect" in result.output
assert "torch" not in sys.modules
"""
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
