"""What golden files are called, and what several checks of one test come to."""

from pathlib import Path

import pytest

from torchperf_ros.replay.golden.fixtures import file_stem

pytest_plugins = ["pytester"]

CHECKS = """
import pytest
from golden_messages import array
from stage_results import result_of

@pytest.fixture
def result(tmp_path):
    return result_of(tmp_path, {"perception": [array(1.0)], "planning": [array(2.0)]})

def test_parts(result, golden):
    golden.check(result, "perception")
    golden.check(result, "planning")

def test_names(result, golden):
    golden.check(result, "perception", name="first")
    golden.check(result, "planning", name="second")

def test_others(result, golden, tmp_path):
    golden.check(result)
    golden.check(result)
    golden.check(result_of(tmp_path, {"perception": [array(7.0)]}))

def test_stage(result, golden):
    golden.check(result.stage("perception"))

def test_unknown(result, golden):
    golden.check(result, "percepton")
"""


def test_given_names_that_differ_in_odd_characters_only_when_made_a_file_s_then_they_are_still_apart():
    names = ["t.ü", "t.ö", "t._", "t[a/b]", "t[a b]", "t[a_b]", "t_a_b_", "t\ud800"]
    stems = [file_stem(name) for name in names]

    assert len(set(stems)) == len(names)
    assert all(stem.replace("-", "_").replace(".", "_").isidentifier() and stem.isascii() for stem in stems)


@pytest.fixture
def checks(pytester):
    """Tests whose results need no replay."""
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}\naddopts = -p no:cacheprovider")
    pytester.makepyfile(test_checks=CHECKS)
    return pytester


def told(result, test):
    """What was said of one failed test."""
    return result.stdout.str().partition(f"_ {test} _")[2].partition("\n____")[0]


def errors(result, test):
    return "\n".join(line for line in told(result, test).splitlines() if line.startswith("E  "))


def test_given_several_checks_of_a_test_when_refreshed_then_none_replaces_what_another_has_written(checks):
    result = checks.runpytest_inprocess("-p", "torchperf", "--refresh-golden")

    result.assert_outcomes(passed=1, failed=4)
    parts = errors(result, "test_parts")
    assert "test_checks.test_parts.mcap holds no outputs of planning, only of perception" in parts
    for text in (parts, errors(result, "test_others")):
        assert "another check of this test has just written it: give each a name, as in golden.check(" in text
        assert "--refresh-golden" not in text
    assert "perception: 1 of 1 frames differ" in errors(result, "test_others")


def test_given_what_is_no_result_or_no_stage_when_checked_then_the_error_says_what_would_be_one(checks):
    result = checks.runpytest_inprocess("-p", "torchperf", "-k", "test_stage or test_unknown")

    result.assert_outcomes(failed=2)
    assert "TypeError: golden.check takes what replay() gave, and stages by name" in errors(result, "test_stage")
    assert "no stage 'percepton'; there are: perception, planning" in errors(result, "test_unknown")


def test_given_a_folder_that_cannot_be_written_when_refreshed_then_the_golden_file_is_named(checks):
    (checks.path / "golden").touch()
    result = checks.runpytest_inprocess("-p", "torchperf", "--refresh-golden", "-k", "test_names")

    result.assert_outcomes(failed=1)
    assert "golden file golden/test_checks.test_names.first.mcap: cannot be written (File exists)" in told(
        result, "test_names"
    )
