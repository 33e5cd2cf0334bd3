"""The command: exit status, files, and one line for what cannot be done."""

import json

import pytest
from typer.testing import CliRunner

from torchperf_ros.tools import main as cli

from .conftest import SAMPLES, breaking_line


def inspect(name, *more):
    return CliRunner().invoke(cli.app, ["inspect", f"{SAMPLES}:{name}", "--input", "8x8", *map(str, more)])


def test_given_a_break_when_inspected_then_terminal_and_json_show_it(tmp_path):
    report = tmp_path / "report.json"
    result = inspect("value_if", "--input", "4x8", "--max-breaks", 0, "--json", report)
    assert result.exit_code == 1, result.output
    text = " ".join(result.stdout.split())
    assert f"graph_samples.py:{breaking_line('value_if')} in value_if" in text
    assert "branch on tensor values" in text
    assert "Data-dependent branching" in text
    assert "Compute both sides, of one shape, and choose by torch.where" in text
    assert "2 graphs, 1 break, 2 recompilations over 2 inputs FAIL: 1 break, at most 0 allowed" in text
    assert max(map(len, result.stdout.splitlines())) <= 100

    found = json.loads(report.read_text())
    assert found["exit_status"] == 1
    assert found["summary"] in text
    assert found["graphs"] == [1, 1, 2, 2]
    assert [item["kind"] for item in found["recompilations"]] == ["size", "size"]
    assert found["inputs"] == ["8x8:float32", "4x8:float32"]
    (broken,) = found["breaks"]
    assert (broken["file"], broken["line"]) == (str(SAMPLES), breaking_line("value_if"))
    assert broken["category"] == "branch on tensor values"
    assert broken["advice"].startswith("Compute both sides")


def test_given_a_model_within_its_limit_when_inspected_then_it_passes_and_its_own_words_are_not_shown():
    result = inspect("printed", "--max-breaks", 1)
    assert result.exit_code == 0
    assert "PASS: 1 break, at most 1 allowed" in result.stdout
    assert "mean tensor" not in result.output


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("idle", ["--options", "{"], ["--options '{'", "JSON"]),
        ("idle", ["--options", "[1]"], ["object"]),
        ("idle", ["--json", "no_such_folder/x.json"], ["--json no_such_folder/x.json", "existing folder"]),
        ("idle", ["--device", "cuda:99"], ["cuda:99"]),
        ("idle", ["--device", "gpu"], ["gpu"]),
        ("raising", [], ["ValueError: the model's own words", "8x8:float32"]),
    ],
)
def test_given_a_value_that_cannot_be_used_when_run_then_one_line_names_it_and_the_status_is_2(
    name, more, words
):
    result = inspect(name, *more)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("torchperf: ")
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
