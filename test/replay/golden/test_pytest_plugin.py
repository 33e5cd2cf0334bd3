"""The plugin as users have it: loaded by its entry point into another pytest, which replays the example's drive."""

import shutil
from pathlib import Path

import pytest

from .test_golden_fixture import told

pytest_plugins = ["pytester"]

EXAMPLE = Path(__file__).parents[3] / "examples" / "guarded_drive"
HEAVY = ["dask", "numpy", "plotly", "pyarrow", "rclpy", "rosbags", "scipy", "torch", "torchperf_ros.replay.replay"]

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
            "assert 0.05 <= 0.01", "perception: 2 of 40 frames not on time; those that took longest:",
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
        "test_missing": ["log nowhere.mcap is not there: looked for", f"{drive.path}/fieldlogs/nowhere.mcap"],
        "test_field": [f"log {drive.path}/fieldlogs/field.mcap: "],
        "test_marker": ['fieldlog takes one log and optional=..., as in fieldlog("drive.mcap")'],
    }.items():  # fmt: skip
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
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(["@pytest.mark.fieldlog(path, optional=False): *"])
