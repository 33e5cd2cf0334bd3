"""The plugin as users have it.

Loaded by its entry point into another pytest, which replays the example's drive.
"""

import shutil
from pathlib import Path

import pytest

from torchperf_ros.replay.golden.fixtures import file_stem

pytest_plugins = ["pytester"]

EXAMPLE = Path(__file__).parents[3] / "examples" / "guarded_drive"
HEAVY = [
    "dask",
    "numpy",
    "plotly",
    "pyarrow",
    "rclpy",
    "rosbags",
    "scipy",
    "torch",
    "torchperf_ros.replay.replay",
]

DRIVE = """
import pytest

pytestmark = pytest.mark.fieldlog("drive.mcap")

@pytest.fixture
def perception(replay):
    return replay(params="lead_vehicle.yaml").stage("perception")

def test_messages(perception):
    messages = list(perception.messages)
    assert len(messages) == 40
    assert [marker.ns for marker in messages[0].message.markers] == ["", "car"]
    assert [anomaly.name for _, anomaly in perception.anomalies] == ["perception: bad input"]

def test_same(replay):
    assert replay(params="lead_vehicle.yaml") is replay(params="lead_vehicle.yaml", pace="fast")

def test_ratio(perception):
    assert perception.miss_ratio <= 0.01

def test_p99(perception):
    assert perception.p99_ms < 0.0

def test_outcomes(perception):
    assert perception.outcomes == {"on_time": 40}

def test_outcome(perception):
    assert perception.outcomes["bad_input"] == 0

@pytest.mark.parametrize("way", ["a/b c"])
def test_golden(perception, replay, golden, way):
    assert golden.path("night").name == "test_drive.test_golden_a_b_c_.night-89f21579.mcap"
    golden.check(replay(params="lead_vehicle.yaml"))

def test_options(replay):
    replay(params="lead_vehicle.yaml", pase="fast")

def test_params(replay):
    replay(params="nowhere.yaml")

@pytest.mark.fieldlog("nowhere.mcap")
def test_missing(replay):
    replay()

@pytest.mark.fieldlog("nowhere.mcap", optional=True)
def test_optional(replay):
    replay()

@pytest.mark.fieldlog("field.mcap", optional=True)
def test_field(replay):
    replay(params="lead_vehicle.yaml")

@pytest.mark.fieldlog()
def test_marker(replay):
    replay()
"""


@pytest.fixture
def drive(pytester):
    """The example's model, drive and parameters in a folder of the test's own; no golden outputs."""
    shutil.copytree(EXAMPLE / "guarded_drive", pytester.path / "models" / "guarded_drive")
    shutil.copy(EXAMPLE / "test" / "drive.mcap", pytester.path)
    shutil.copy(EXAMPLE / "config" / "lead_vehicle.yaml", pytester.path)
    pytester.makeini("[pytest]\npythonpath = models\naddopts = --strict-markers -p no:cacheprovider")
    return pytester


def test_given_tests_of_a_drive_when_run_then_what_fails_says_why(drive):
    drive.makepyfile(test_drive=DRIVE)
    (drive.mkdir("fieldlogs") / "field.mcap").touch()
    result = drive.runpytest_inprocess("-p", "torchperf", "--fieldlogs", "fieldlogs", "-rs", "-vv")
    result.assert_outcomes(passed=2, failed=10, skipped=1)

    for test, words in {
        "test_ratio": [
            "assert 0.05 <= 0.01",
            "perception: 2 of 40 frames not on time; those that took longest:",
            *(f"\nE           {seq}   176000000{seq // 10}.{seq % 10}00000000 " for seq in (22, 23)),
            "bad_input  full  hold_last  the camera is dazzled: 100% of the image is bright",
            "perception = <stage perception: 40 frames, 38 on_time, 2 bad_input>",
        ],
        "test_p99": ["perception: 40 of 40 frames in all; those that took longest:"],
        "test_outcomes": ["assert {'on_time': 38, 'bad_input': 2} == {'on_time': 40}"],
        "test_outcome": ["assert 2 == 0"],
        "test_golden[a/b c]": [
            "golden file golden/test_drive.test_golden_a_b_c_-3916ee6c.mcap is missing",
            "pytest --refresh-golden 'test_drive.py::test_golden[a/b c]' --fieldlogs fieldlogs",
        ],
        "test_options": ["unexpected keyword argument 'pase'"],
        "test_params": ["params nowhere.yaml: is neither beside", "test_drive.py", "nor in"],
        "test_missing": [
            "log nowhere.mcap is not there: looked for",
            f"{drive.path}/fieldlogs/nowhere.mcap",
        ],
        "test_field": [f"log {drive.path}/fieldlogs/field.mcap: "],
        "test_marker": ['fieldlog takes one log and optional=..., as in fieldlog("drive.mcap")'],
    }.items():
        found = told(result, test)
        assert [word for word in words if word not in found] == [], test
        assert "During handling" not in found, test
        if test in {"test_ratio", "test_outcomes", "test_outcome"}:
            assert found.count("the camera is dazzled") == 2, test
    assert "fixtures.py" not in told(result, "test_golden[a/b c]")  # the traceback ends in the test
    result.stdout.fnmatch_lines(["SKIPPED*log nowhere.mcap is not there: looked for*"])


def test_given_no_drive_when_pytest_runs_then_the_plugin_has_loaded_nothing_and_changed_nothing(pytester):
    pytester.makepyfile(f"""
import sys
import pytest

@pytest.fixture
def replay():
    return "the user's own"

def test_loaded(replay):
    assert replay == "the user's own"
    assert "torchperf_ros.replay.golden.pytest_plugin" in sys.modules
    assert [name for name in {HEAVY} if name in sys.modules] == []

def test_assertion():
    assert 0.5 <= 0.25
""")
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "--strict-markers")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*assert 0.5 <= 0.25"])


def test_given_pytest_when_asked_for_help_then_options_and_marker_are_explained(pytester):
    result = pytester.runpytest_inprocess("--help", "-p", "torchperf")
    result.stdout.fnmatch_lines(["replays of field logs*", "*--fieldlogs=DIR*", "*--refresh-golden*"])
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.fieldlog(path, optional=False): *"]
    )


# -- several checks of one test, whose results need no replay

CHECKS = """
import pytest
from made_outputs import array, result_of

@pytest.fixture
def result(tmp_path):
    return result_of(tmp_path, {"perception": [array(1.0)], "planning": [array(2.0)]},
                     engines={"perception": "full eager"})

def test_parts(result, golden):
    golden.check(result, "perception")
    golden.check(result, "planning")

def test_names(result, golden):
    golden.check(result, "perception", name="first")
    golden.check(result, "planning", name="second")

def test_others(result, golden, tmp_path):
    golden.check(result)
    golden.check(result)
    golden.check(result_of(tmp_path, {"perception": [array(7.0)]}, engines={"perception": "full onnxruntime"}))

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
        assert (
            "another check of this test has just written it: give each a name, as in golden.check(" in text
        )
        assert "--refresh-golden" not in text
    assert "perception: 1 of 1 frames differ" in errors(result, "test_others")
    assert "  engines: full onnxruntime; golden: full eager" in errors(result, "test_others")


def test_given_what_is_no_result_or_no_stage_when_checked_then_the_error_says_what_would_be_one(checks):
    result = checks.runpytest_inprocess("-p", "torchperf", "-k", "test_stage or test_unknown")

    result.assert_outcomes(failed=2)
    assert "TypeError: golden.check takes what replay() gave, and stages by name" in errors(
        result, "test_stage"
    )
    assert "no stage 'percepton'; there are: perception, planning" in errors(result, "test_unknown")


def test_given_a_folder_that_cannot_be_written_when_refreshed_then_the_golden_file_is_named(checks):
    (checks.path / "golden").touch()
    result = checks.runpytest_inprocess("-p", "torchperf", "--refresh-golden", "-k", "test_names")

    result.assert_outcomes(failed=1)
    assert "golden file golden/test_checks.test_names.first.mcap: cannot be written (File exists)" in told(
        result, "test_names"
    )
