"""`torchperf doctor` on logs: what it prints, its figures, and its exit status."""

import json

import pytest
from typer.testing import CliRunner

from torchperf_ros.tools.main import app

from .runs import report_logs as logs


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def aged(age_ms):
    """Records of frames of this age at receipt, 50 ms apart."""
    return [line | {"age_ms": age_ms} if line["kind"] == "frame" else line for line in logs.records()]


def test_given_a_log_when_examined_then_the_largest_part_is_named_and_what_a_log_lacks_is_said(tmp_path):
    file = tmp_path / "found.json"
    result = doctor(logs.write_log(tmp_path / "drive"), "--json", file)
    assert result.exit_code == 0, result.output
    assert "perception: the largest part is inference" in result.output
    assert "camera and transport are one part" in result.output
    assert "Nothing stands out" in result.output
    assert json.loads(file.read_text())[0]["largest"] == {
        "perception": "inference",
        "planning": "inference",
    }


def test_given_records_of_old_frames_when_examined_then_what_was_before_receipt_is_to_be_looked_at(
    tmp_path,
):
    result = doctor(logs.write_records(tmp_path / "records.jsonl", aged(120.0)))
    assert result.exit_code == 1, result.output
    assert "perception: the largest part is input" in result.output
    assert "torchperf doctor --node /perf" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.mcap"], "log none.mcap: does not exist"),
        (["none.mcap", "--actuation", "/cmd"], "--actuation: names a live topic"),
        (
            ["none.mcap", "--json", "no/folder.json"],
            "--json no/folder.json: needs a file name in an existing folder",
        ),
    ],
)
def test_given_what_cannot_be_used_when_examined_then_it_is_named_and_the_status_is_2(arguments, words):
    result = doctor(*arguments)
    assert result.exit_code == 2
    assert words in result.output
