"""The examples do what their READMEs say, on a copy, as a user would run them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXACT = """
import pytest
from torchperf_ros.replay.message_rule import MessageRule, Tolerance

@pytest.fixture(scope="session")
def golden_rules():
    return {"visualization_msgs/msg/Marker": MessageRule(ignore=("lifetime",), tolerances={"": Tolerance()})}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the example."""
    folder = tmp_path_factory.mktemp("examples") / "guarded_drive"
    return shutil.copytree(EXAMPLES / "guarded_drive", folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))


def run(package, command=(sys.executable, "-m", "pytest")):
    """Exit status and output of a command in the package's folder."""
    shell = isinstance(command, str)
    done = subprocess.run(command, cwd=package, shell=shell, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def change(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_given_the_example_as_it_is_when_tested_then_it_passes_without_a_warning(package):
    status, text = run(package)
    assert status == 0, text
    assert "1 passed in" in text


def test_given_a_changed_output_when_tested_then_the_test_fails_until_the_command_that_it_names_is_run(package):
    model = package / "guarded_drive" / "lead_vehicle.py"
    change(model, "right - left, bottom - top)", "right - left + 0.001, bottom - top)")
    status, text = run(package)
    assert status == 0, text
    assert "golden file test/golden/test_drive.test_low_sun.mcap is older: model of perception changed since" in text

    (package / "test" / "conftest.py").write_text(EXACT)
    status, text = run(package)
    assert status == 1, text
    for words in (
        "outputs differ from golden file test/golden/test_drive.test_low_sun.mcap (model of perception changed since)",
        "perception: 40 of 40 frames differ",
        "first in frame seq 0, stamp 1760000000.000000000:",
        "markers[1].scale.x is 1.8751875, golden 1.875: off by 0.0001875, allowed 0",
    ):
        assert words in text

    (command,) = {line.partition("refreshes it: ")[2] for line in text.splitlines() if "refreshes it: " in line}
    status, text = run(package, command)
    assert status == 0, text
    assert "golden outputs: test/golden/test_drive.test_low_sun.mcap has 40 outputs" in text
    status, text = run(package)
    assert status == 0, text
    assert "older" not in text


def test_given_a_smaller_budget_when_tested_then_the_frames_that_came_late_are_shown(package):
    change(package / "config" / "lead_vehicle.yaml", "budget_ms: 50.0", "budget_ms: 30.0")
    status, text = run(package)
    assert status == 1, text
    assert "perception: 22 of 40 frames not on time; those that took longest:" in text
    (frame,) = [line.split() for line in text.splitlines() if " 1760000000.300000000 " in line]
    assert frame[1] == "3"
    assert frame[4:7] == ["late", "full", "hold_last"]
