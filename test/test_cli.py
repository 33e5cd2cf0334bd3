"""The command line: quick, helpful, and one line for what cannot be done."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.tools import main as cli
from torchperf_ros.tools import shell

RUNNER = CliRunner()


def test_given_help_when_asked_then_neither_torch_nor_rclpy_nor_the_demo_is_loaded(python) -> None:
    program = """
import sys
from typer.testing import CliRunner
from torchperf_ros.tools import main as cli
for words in [], *([name] for name in ("demo", "make-log", "tune", "rollout")):
    result = CliRunner().invoke(cli.app, [*words, "--help"])
    assert result.exit_code == 0 and (words or "demo" in result.output), result.output
heavy = {"torch", "rclpy", "rosbags", "numpy", "torchperf_ros.tools.demo.drive", "torchperf_ros.tools.demo.make_log"}
loaded = heavy & set(sys.modules)
assert not loaded, loaded
"""
    python(program)


@pytest.mark.parametrize("columns", ["80", "40"])
def test_given_a_narrow_terminal_when_help_is_asked_then_nothing_of_any_command_is_cut_off(
    python, columns: str
) -> None:
    program = r"""
import re
from click.testing import CliRunner
from typer.main import get_command
from torchperf_ros.tools import main as cli

whole = get_command(cli.app)

def look(command, words):
    result = CliRunner().invoke(whole, [*words, "--help"])
    assert result.exit_code == 0, result.output
    cut = [line for line in result.output.splitlines() if re.search(chr(0x2026) + r"|\w\.\.\.$", line)]
    names = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
    assert not cut and all(name in result.output for name in names), (words, cut, names)
    for name, inner in getattr(command, "commands", {}).items():
        look(inner, [*words, name])

look(whole, [])
"""
    python(program, COLUMNS=columns)


@pytest.mark.parametrize("columns", ["80", "50"])
def test_given_any_width_when_help_is_asked_then_prose_fills_it_and_each_example_has_its_line(
    python, columns: str
) -> None:
    program = f"""
from typer.testing import CliRunner
from torchperf_ros.tools import main as cli
lines = CliRunner().invoke(cli.app, ["replay", "--help"]).output.splitlines()
assert "torchperf replay logs/ --parallel 2 -o results" in [line.strip() for line in lines], lines
prose = [line.strip() for line in lines[: lines.index(next(line for line in lines if "Examples:" in line))]]
short = [a for a, b in zip(prose, prose[1:]) if a and b and len(f"{{a}} {{b.split()[0]}}") < {columns} - 2]
assert not short, short
"""
    python(program, COLUMNS=columns)


@pytest.mark.parametrize("command", ["demo", "node", "record"])
def test_given_no_rclpy_when_run_then_it_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = RUNNER.invoke(cli.app, [command])
    assert result.exit_code == 2
    assert "rclpy" in result.output
    assert "pip install" in result.output


def test_given_a_log_that_does_not_exist_when_driven_then_one_line_says_so_and_the_status_is_2(
    tmp_path: Path,
) -> None:
    pytest.importorskip("rclpy")
    result = RUNNER.invoke(cli.app, ["demo", "--log", str(tmp_path / "none.mcap")])
    assert result.exit_code == 2
    assert result.output.strip() == f"torchperf: log {tmp_path / 'none.mcap'}: does not exist"


@pytest.mark.parametrize("name", ["report.json", "view.svg"])
def test_given_a_file_in_no_folder_when_driven_then_it_is_refused_before_the_drive(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip("rclpy")
    result = RUNNER.invoke(cli.app, ["demo", "-o", str(tmp_path / "none" / name)])
    assert result.exit_code == 2
    assert "existing folder" in result.output


def test_given_a_value_with_spaces_when_used_then_it_is_no_option(tmp_path: Path) -> None:
    for words in (["report"], ["replay"], ["compare"], ["demo", "--json=a b"]):
        done = RUNNER.invoke(cli.app, [*words, str(tmp_path / "no such log")])
        assert done.exit_code != 0
        assert "no such option any more" not in done.output


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="a folder is needed that even root cannot write to"
)
def test_given_a_folder_that_cannot_be_written_to_when_checked_then_that_is_known_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match=r"-o /proc/tuned.yaml: cannot be written there: "):
        shell.check_outputs({"-o": Path("/proc/tuned.yaml")})
    shell.check_outputs({"-o": tmp_path / "tuned.yaml"})
    assert list(tmp_path.iterdir()) == []


def test_given_a_disk_that_is_full_when_an_output_is_written_then_the_one_before_is_whole(
    tmp_path, limited
):
    path = tmp_path / "tuned.yaml"
    shell.write_output(path, "before")
    with limited("FSIZE", 100), pytest.raises(ConfigError, match=f"{path}: cannot be written: "):
        shell.write_output(path, "after" * 1000)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("tuned.yaml", "before")]
    shell.write_output(path, "after")
    assert path.read_text() == "after"


def test_given_a_log_that_begins_again_when_followed_then_the_time_left_is_of_this_round(
    monkeypatch, capsys
):
    now_s, bars = [0.0], shell.progress_bars()
    bars.get_time = lambda: now_s[0]
    monkeypatch.setattr(shell, "monotonic", bars.get_time)
    tell = shell.follow(bars, "drive.mcap", per_s=1.0)
    for now_s[0], done in ((1.0, 0), (91.0, 50), (111.0, 1), (151.0, 41)):  # the third is in the next round
        tell(done, 60)
    assert capsys.readouterr().err.splitlines()[-1] == "drive.mcap: at 41.0 of 60.0 s, 19 s left"
