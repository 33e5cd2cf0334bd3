import io
import json

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from torchperf_ros.analysis import curve_run
from torchperf_ros.cli import app


@pytest.fixture
def measured(monkeypatch):
    asked = {}

    def fill(curve):
        def measure_curve(lengths, device, *, seconds, on_step):
            asked.update(lengths=lengths, device=device.type, seconds=seconds)
            for step in range(curve_run.steps(lengths, device)):
                on_step(f"step {step}")
            return curve

        monkeypatch.setattr(curve_run, "measure_curve", measure_curve)
        return asked

    return fill


def test_given_a_run_when_done_then_table_csv_json_and_a_picture_are_there(measured, make_curve, tmp_path):
    asked = measured(make_curve((1.5, 12.0)))
    folder = tmp_path / "new" / "curve"
    done = CliRunner().invoke(
        app, ["bench", "curve", "--n", "30, 1,1", "--seconds", "0.5", "--device", "cpu", "-o", str(folder)]
    )
    assert done.exit_code == 0, done.output
    assert asked == {"lengths": [1, 30], "device": "cpu", "seconds": 0.5}
    assert "met: auto at least 5.3 times eager at n = 30" in done.output
    assert "threads 1" in done.output
    assert (folder / "curve.csv").read_text().startswith("length,engine,")
    assert json.loads((folder / "curve.json").read_text())["machine"]["threads"] == 1
    with Image.open(folder / "curve.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50  # lines of several colours


def test_given_a_missed_target_when_done_then_the_exit_status_is_1(measured, make_curve):
    measured(make_curve((0.5, 12.0)))
    done = CliRunner().invoke(app, ["bench", "curve", "--device", "cpu"])
    assert done.exit_code == 1
    assert "missed: auto at most 5% slower" in done.output


def test_given_an_engine_that_failed_when_done_then_its_error_is_shown(measured, make_curve):
    measured(make_curve((2.0, 12.0), failed="dynamic"))
    done = CliRunner().invoke(app, ["bench", "curve", "--device", "cpu"])
    assert "n = 1, dynamic: CppCompileError: no compiler" in done.output


def test_given_no_matplotlib_when_written_then_the_figures_are_and_it_says_what_is_missing(
    measured, make_curve, tmp_path, monkeypatch
):
    measured(make_curve((2.0, 12.0)))
    monkeypatch.setattr(curve_run.importlib.util, "find_spec", lambda name: None)
    console = Console(width=100, file=io.StringIO())
    curve_run.run_curve([1, 30], "cpu", 0.1, tmp_path, console)
    assert "pip install 'torchperf_ros[analysis]'" in console.file.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.csv", "curve.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "0"], "'0': lengths from 1 to 1000"),
        (["--n", "1,two"], "'1,two': lengths from 1 to 1000"),
        (["--n", ""], "'': lengths from 1 to 1000"),
        (["--device", "tpu"], "'tpu': auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "'cuda:99' is not there"),
        (["--seconds", "0"], "--seconds"),
        (["-o", "/dev/null/x"], "/dev/null"),
    ],
)
def test_given_input_that_cannot_be_used_when_asked_then_it_says_so_and_exits_with_2(arguments, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["bench", "curve", *arguments])
    assert done.exit_code == 2
    assert message in done.output
