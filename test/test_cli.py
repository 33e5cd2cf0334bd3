"""The command line: quick, helpful, and one line for what cannot be done."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchperf_ros import cli

RUNNER = CliRunner()


def test_given_no_arguments_when_run_then_help_names_the_commands() -> None:
    result = RUNNER.invoke(cli.app, [])
    for command in ("demo", "node"):
        assert command in result.output


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"], ["make-log", "--help"]])
def test_given_help_when_asked_then_neither_torch_nor_rclpy_nor_the_demo_is_loaded(command: list[str]) -> None:
    program = f"""
import sys
from typer.testing import CliRunner
from torchperf_ros import cli
result = CliRunner().invoke(cli.app, {command!r})
assert result.exit_code == 0, result.output
heavy = {{"torch", "rclpy", "rosbags", "numpy", "torchperf_ros.demo.drive", "torchperf_ros.demo.make_log"}}
loaded = heavy & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=Path(cli.__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["demo", "node"])
def test_given_no_rclpy_when_run_then_it_says_what_to_install(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    result = RUNNER.invoke(cli.app, [command])
    assert result.exit_code == 2
    assert "rclpy" in result.output
    assert "pip install" in result.output


def test_given_a_log_that_does_not_exist_when_driven_then_one_line_says_so_and_the_status_is_2(tmp_path: Path) -> None:
    pytest.importorskip("rclpy")
    result = RUNNER.invoke(cli.app, ["demo", "--log", str(tmp_path / "none.mcap")])
    assert result.exit_code == 2
    assert result.output.strip() == f"torchperf: log {tmp_path / 'none.mcap'}: does not exist"


@pytest.mark.parametrize("flag", ["--json", "--svg"])
def test_given_a_file_in_no_folder_when_driven_then_it_is_refused_before_the_drive(tmp_path: Path, flag: str) -> None:
    pytest.importorskip("rclpy")
    result = RUNNER.invoke(cli.app, ["demo", flag, str(tmp_path / "none" / "file")])
    assert result.exit_code == 2
    assert "existing folder" in result.output
