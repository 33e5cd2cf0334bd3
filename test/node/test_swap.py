"""A node with a standby that is asked for things by services.

A profile, and a package swapped in by the command.
"""

import gc
import os
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from test.settings.test_files import NO_FILES

pytest.importorskip("rclpy")

from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from typer.testing import CliRunner

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.node.services import SERVICE, SwapService
from torchperf_ros.settings.config import node_config, stage_config
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.stage import Stage
from torchperf_ros.tools.main import app
from torchperf_ros.workers.worker_setup import worker_setup

from ..stage.conftest import wait_until
from .perf_process import ROOT

ADAPTER = "adapters_for_graph:Obedient"
PATIENCE_S = 300.0  # a compiler's, on a machine that does other things as well

pytestmark = pytest.mark.timeout(PATIENCE_S)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(__file__).parent)]))
        words = ["compile", ADAPTER, "--tier", "fast", "--engine", "openvino", "-o", str(folder)]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "compiling fast (1 of 1)" in result.output
    return folder / "fast.blob"


@pytest.fixture(scope="module")
def node(start_node, obedient, package, evidence):
    stage = obedient(backup="standby", engine="eager", hang_ms=60_000.0, budget_ms=10_000.0)
    dirs = {"package_dirs": [str(package.parent)], "evidence_dir": str(evidence)}
    node = start_node({"stages": ["perception"], **dirs, "perception": stage})
    node.wait_until_ready("perception")
    return node


@pytest.fixture
def swap(node, camera, image, warm_process, tmp_path):
    """Run `torchperf swap` while frames come.

    Returns exit status, what it said, and the frames' outcomes.
    """

    def run(*words):
        first = len(node.rows)
        environment = os.environ | {"ROS_DOMAIN_ID": str(node.graph.context.get_domain_id())}
        with (tmp_path / "said").open("w") as prints:
            words = ["swap", "--node", node.name, *map(str, words)]
            process = warm_process.start("torchperf", words, environment, prints.fileno())
        node.drive(camera, image, lambda: process.poll() is not None, "the end of the command")
        said = (tmp_path / "said").read_text()
        return process.returncode, said, {Outcome(int(row["outcome"])) for row in node.rows[first:]}

    return run


@pytest.fixture
def refused(node, monkeypatch):
    """Run `torchperf swap` in this process, which takes less time; returns exit status and output."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(node.graph.context.get_domain_id()))

    def ask(*words):
        result = CliRunner().invoke(app, ["swap", "--node", node.name, *map(str, words)])
        return result.exit_code, result.output

    return ask


def test_given_a_package_then_every_frame_is_answered_on_time_and_the_tier_runs_it(node, swap, package):
    assert node.values("perception")["tier_fast_engine"] == "eager"
    status, said, outcomes = swap("perception", "fast", package)
    assert status == 0, said
    assert f"perception fast runs {package}" in said
    assert outcomes == {Outcome.ON_TIME}
    node.next_report()
    values = node.values("perception")
    assert (values["tier_fast_engine"], values["engine"], values["restarts"]) == (
        "openvino",
        "openvino",
        "0",
    )
    assert values["tier_fast_package"]


def test_given_a_damaged_package_then_the_reason_is_told_and_nothing_changes(node, swap, package):
    bad = package.with_name("bad.blob")
    for ending in (".blob", ".json"):
        shutil.copy(package.with_suffix(ending), bad.with_suffix(ending))
    bad.write_bytes(bad.read_bytes()[:-1])
    worker = node.values("perception")["worker_0_pid"]
    status, said, outcomes = swap("perception", "fast", bad)
    assert status == 1
    assert "perception fast runs what it ran before" in said
    assert f"package {bad} has" in said
    assert "truncated" in said
    assert outcomes == {Outcome.ON_TIME}
    node.next_report()
    assert node.values("perception")["worker_0_pid"] == worker


def test_given_a_package_in_another_folder_when_swapped_in_then_the_parameter_is_named(
    refused, package, tmp_path
):
    elsewhere = shutil.copy(package, tmp_path)
    status, said = refused("perception", "fast", elsewhere)
    assert status == 1
    assert f"package {elsewhere} is in none of the folders that packages are taken from" in said
    assert f"{package.parent}); move it there, or name its folder in the parameter package_dirs" in said


def test_given_a_package_that_was_built_for_another_tier_when_swapped_in_then_one_line_names_both(
    refused, package
):
    other = Path(shutil.copy(package, package.with_name("other.blob")))
    manifest = package.with_suffix(".json").read_text().replace('"tier": "fast"', '"tier": "full"')
    other.with_suffix(".json").write_text(manifest)
    status, said = refused("perception", "fast", other)
    assert status == 1
    why = f"package {other} was built for tier full of {ADAPTER}; it cannot run as tier fast of {ADAPTER}"
    assert why in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("lidar", "fast"), "stage 'lidar' is not there; the node has perception"),
        (("perception", "best"), "tier 'best' is not there; stage perception has fast"),
    ],
)
def test_given_a_name_that_is_not_there_when_swapped_then_the_reason_names_what_is(
    refused, package, words, why
):
    status, said = refused(*words, package)
    assert (status, why in said) == (1, True), said


def test_given_a_file_that_is_not_there_when_swapped_then_it_is_said_at_once(refused, tmp_path):
    status, said = refused("perception", "fast", tmp_path / "none.blob")
    assert (status, said) == (2, f"torchperf: package {tmp_path / 'none.blob'} is not there\n")


def test_given_a_node_with_a_standby_then_frames_go_on_and_diagnostics_say_where_it_is(
    node, camera, evidence, image
):
    from std_srvs.srv import Trigger

    node.answer(camera, image())
    assert node.call(Trigger, "profile", Trigger.Request()).success
    said = node.call(Trigger, "profile", Trigger.Request())
    assert not said.success
    assert "stage perception is busy with one already (profile" in said.message
    first = len(node.rows)
    node.drive(camera, image, lambda: node.values("perception")["evidence"], "the profile")
    path, _, summary = node.values("perception")["evidence"].partition(": ")
    assert Path(path).parent == evidence
    assert (Path(path) / "trace.json.gz").is_file()
    assert "frames of" in summary
    assert {Outcome(int(row["outcome"])) for row in node.rows[first:]} == {Outcome.ON_TIME}
    assert {int(node.values("perception")[key]) for key in ("restarts", "missed_deadline")} == {0}
    assert {"memory_growth_mib_per_hour", "memory_exhausted_in_s"} <= node.values("perception").keys()
    assert "memory_growth_mib_per_hour" in node.values("node")


# -- the service, without workers


@pytest.fixture
def offered(stranger):
    """The service of a node with one stage whose workers were not started; asks it, and has the stage."""
    config = stage_config("perception", {"adapter": "m:C", "output": "o", "tiers": ["fast"]})
    ports = StagePorts(lambda _: None, lambda *_: None, lambda _: None, lambda _: None, lambda *_: None)
    stages = [Stage(config, worker_setup(config, node_config({"device": "cpu"}, {})), ports, lambda: 0)]
    service = SwapService(stranger, lambda: stages)

    def ask(package=""):
        value = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=package)
        request = SERVICE.Request(
            parameters=[Parameter(name="perception.fast", value=value)] if package else []
        )
        result = service._answer(request, SERVICE.Response()).result
        return result.successful, result.reason

    yield ask, stages
    for stage in stages:
        stage.stop()


def test_given_a_look_that_takes_long_when_a_swap_is_asked_for_then_the_answer_comes_at_once(
    offered, monkeypatch
):
    ask, (stage,) = offered
    looked = threading.Event()
    monkeypatch.setattr(stage.pool, "why_no_room", lambda: looked.wait(60.0) and "none is left")
    assert ask("/none.pt2") == (False, "swapping: the package is looked at")
    assert ask() == (False, "swapping: the package is looked at")
    assert ask("/other.pt2") == (
        False,
        "the package of another swap is looked at just now; try again later",
    )
    looked.set()
    wait_until(lambda: "for which there is no memory: none is left" in ask()[1], ask)


@pytest.mark.parametrize("said", NO_FILES)
def test_given_what_is_no_file_in_place_of_package_or_manifest_when_swapped_then_it_is_said(
    offered, tmp_path, monkeypatch, said
):
    ask, (stage,) = offered
    monkeypatch.chdir(tmp_path)
    renewal = stage.pool.rolling_update.renewal
    setup = replace(renewal.proven.setup, package_dirs=(str(tmp_path),))
    renewal.proven = renewal.proven._replace(setup=setup)
    package = tmp_path / "a.pt2"
    package.write_bytes(b"x")
    NO_FILES[said](tmp_path / "a.json")
    ask(str(package))
    wait_until(lambda: not ask()[1].startswith("swapping: the package"), ask)
    # others are no manifest; the worker finds none
    assert ("cannot be read" in ask()[1]) is ("bytes" in said), ask()


def test_given_a_swap_when_its_configuration_has_ended_then_nothing_of_the_stage_is_kept_or_told(offered):
    ask, stages = offered
    assert ask() == (False, "nothing was swapped since the node was configured")
    ask("/none.pt2")
    wait_until(lambda: "package /none.pt2 is not there" in ask()[1], ask)
    stage = weakref.ref(stages[0])
    stages.pop().stop()
    gc.collect()
    assert stage() is None
