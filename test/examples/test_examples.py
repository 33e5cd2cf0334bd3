"""The example does what its README says, on a copy, as a user would run it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytest.importorskip(
    "scipy.optimize"
)  # which cannot be imported a second time; each run in this process would

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = (EXAMPLES.parent / "docs" / "testing.md").read_text(encoding="utf-8")
TEST, RULES = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture
def package(pytester, monkeypatch):
    """A copy of the example, in which pytest runs."""
    for name in ("CI", "BUILD_NUMBER"):  # where they are set pytest shows long texts to their ends
        monkeypatch.delenv(name, raising=False)
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    return shutil.copytree(EXAMPLES / "guarded_drive", pytester.path, ignore=ignored, dirs_exist_ok=True)


def run(pytester, *arguments):
    """Exit status and output of pytest in the package's folder."""
    result = pytester.runpytest_inprocess("-p", "torchperf", *arguments)
    return result.ret, result.stdout.str() + result.stderr.str()


def change(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_given_the_guide_when_it_shows_a_test_then_it_is_the_examples(package):
    assert (package / "test" / "test_drive.py").read_text(encoding="utf-8").endswith(TEST)


def test_given_the_example_as_it_is_when_tested_then_it_passes_without_a_warning(pytester, package):
    result = pytester.runpytest_subprocess()  # a program of its own, as a user starts it
    result.assert_outcomes(passed=1, warnings=0)


def test_given_a_changed_output_then_rules_decide_and_the_command_that_is_named_refreshes(
    pytester, package
):
    model, rules = package / "guarded_drive" / "lead_vehicle.py", package / "test" / "conftest.py"
    change(model, "right - left, bottom - top)", "right - left + 0.1, bottom - top)")
    rules.write_text(RULES, encoding="utf-8")
    status, text = run(pytester)
    assert status == 0, text
    assert (
        "golden file test/golden/test_drive.test_low_sun.mcap is older: model of perception changed since"
        in text
    )

    rules.unlink()
    status, text = run(pytester)
    assert status == 1, text
    shown = GUIDE[
        GUIDE.index("E       AssertionError: outputs differ") : GUIDE.index("E       the command that")
    ]
    assert shown in text
    (command,) = {
        line.partition("refreshes it: ")[2] for line in text.splitlines() if "refreshes it: " in line
    }

    program, *arguments = shlex.split(command)
    status, text = run(pytester, *arguments)
    assert (program, status) == ("pytest", 0), text
    assert "golden outputs: test/golden/test_drive.test_low_sun.mcap has 40 outputs" in text
    status, text = run(pytester)
    assert status == 0, text
    assert "older" not in text


def test_given_a_smaller_budget_when_tested_then_the_frames_that_came_late_are_shown(pytester, package):
    change(package / "config" / "lead_vehicle.yaml", "budget_ms: 50.0", "budget_ms: 30.0")
    status, text = run(pytester)
    assert status == 1, text
    assert (
        GUIDE[GUIDE.index("E       AssertionError: assert 0.55") : GUIDE.index("```\n\npytest shows")]
        in text
    )
