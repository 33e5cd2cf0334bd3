"""The examples do what their READMEs say, on a copy, as a user would run them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = (EXAMPLES.parent / "docs" / "testing.md").read_text(encoding="utf-8")
TEST, RULES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the example."""
    folder = tmp_path_factory.mktemp("examples") / "guarded_drive"
    return shutil.copytree(EXAMPLES / "guarded_drive", folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))


def run(package, command=(sys.executable, "-m", "pytest")):
    """Exit status and output of a command in the package's folder."""
    shell = isinstance(command, str)
    # where these are set pytest shows long texts to their ends, and the guide shows what people see
    environment = {name: value for name, value in os.environ.items() if name not in {"CI", "BUILD_NUMBER"}}
    done = subprocess.run(
        command, cwd=package, shell=shell, capture_output=True, text=True, check=False, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def change(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_given_the_guide_when_it_shows_a_test_then_it_is_the_examples(package):
    assert (package / "test" / "test_drive.py").read_text(encoding="utf-8").endswith(TEST)


def test_given_the_example_as_it_is_when_tested_then_it_passes_without_a_warning(package):
    status, text = run(package)
    assert status == 0, text
    assert "1 passed in" in text, text[text.find("warnings summary") :]


def test_given_a_changed_output_when_tested_then_rules_decide_and_the_command_that_is_named_refreshes(package):
    model, rules = package / "guarded_drive" / "lead_vehicle.py", package / "test" / "conftest.py"
    change(model, "right - left, bottom - top)", "right - left + 0.1, bottom - top)")
    rules.write_text(RULES, encoding="utf-8")
    status, text = run(package)
    assert status == 0, text
    assert "golden file test/golden/test_drive.test_low_sun.mcap is older: model of perception changed since" in text

    rules.unlink()
    status, text = run(package)
    assert status == 1, text
    shown = GUIDE[GUIDE.index("E       AssertionError: outputs differ") : GUIDE.index("E       the command that")]
    assert shown in text
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
    assert GUIDE[GUIDE.index("E       AssertionError: assert 0.55") : GUIDE.index("```\n\npytest shows")] in text
