"""A node with a candidate of a stage.

Beside, in service, and back by itself, with the parameters that people set.
"""

import itertools
import os
import re
import signal

import pytest
from typer.testing import CliRunner

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.fleet.plan import CandidateFigures, broken_guard
from torchperf_ros.fleet.sources import ParameterSource
from torchperf_ros.settings.config import stage_config
from torchperf_ros.tools.main import app


@pytest.fixture(scope="module")
def node(start_node, obedient):
    node = start_node({"stages": ["perception"], "perception": obedient(engine="eager", hang_ms=60_000.0)})
    node.wait_until_ready("perception")
    return node


@pytest.fixture(scope="module")
def points(node):
    from geometry_msgs.msg import PointStamped

    return node.graph.listen(f"{node.namespace}/point", PointStamped)


@pytest.fixture(scope="module")
def candidate(tmp_path_factory):
    path = tmp_path_factory.mktemp("candidate") / "b.yaml"
    path.write_text("version: b\nadapter: adapters_for_graph:Shifted\n")
    return path


@pytest.fixture(scope="module")
def scored(candidate):
    path = candidate.with_name("scored.yaml")
    path.write_text(candidate.read_text().replace("Shifted", "Scored"))
    return path


@pytest.fixture
def set_parameter(node):
    from rcl_interfaces.srv import SetParameters
    from rclpy.parameter import Parameter

    node.graph.client(SetParameters, f"{node.name}/set_parameters")

    def set_parameter(name, value):
        request = SetParameters.Request(
            parameters=[Parameter(f"perception.{name}", value=value).to_parameter_msg()]
        )
        return node.graph.call(SetParameters, f"{node.name}/set_parameters", request).results[0]

    return set_parameter


def x_of(node, camera, message, points):
    """What comes out for this image, as the last of the points."""
    node.answer(camera, message)
    node.graph.wait_for(lambda: points and points[-1].header.stamp == message.header.stamp, "the output")
    return points[-1].point.x


@pytest.fixture
def drive(node, camera, image, points):
    """Send frames until a value of the stage's status is as it should be.

    Returns the last output and all outcomes.
    """

    def drive(key, wanted):
        first = len(node.rows)
        node.drive(
            camera,
            image,
            lambda: re.fullmatch(wanted, node.values("perception").get(key, "")),
            lambda: f"{key} {wanted}: {node.values('perception')}",
            240.0,  # outputs are compared in idle time, if there is any
        )
        outcomes = {Outcome(int(row["outcome"])) for row in node.rows[first:]}
        return points[-1].point.x, outcomes

    return drive


@pytest.mark.timeout(600)
def test_given_a_candidate_when_set_then_it_is_beside_serves_and_comes_back_by_itself(
    node, camera, image, points, candidate, scored, set_parameter, drive
):
    assert "candidate" not in node.values("perception")
    assert set_parameter("candidate", str(scored)).successful
    drive("candidate", "b: shadow")
    x, _ = drive("candidate_differs", "point.x is 64.5, in the base 64.0")
    assert x == 64.0
    assert "of" in node.values("perception")["candidate_pairs"]
    (comparer,) = [child for child in node.children() if "fleet.comparer" in " ".join(child.cmdline())]
    assert os.sched_getscheduler(comparer.pid) == os.SCHED_IDLE  # however the node is scheduled
    assert any(
        "adapters_for_graph:Scored" in argument for argument in comparer.cmdline()
    )  # which has a score

    assert set_parameter("candidate_serves", True).successful
    _, outcomes = drive("version", "b")
    assert outcomes == {Outcome.ON_TIME}
    assert x_of(node, camera, image(), points) == 64.5

    deaths = 0
    while deaths < 2 and node.values("perception")["version"] == "b":  # the second death is one too many
        row = node.answer(camera, image(width=13, height=2))  # it may come before the next worker is up
        deaths += row["outcome"] == Outcome.CRASHED
    x, _ = drive("version", "base")
    assert x_of(node, camera, image(), points) == 64.0
    drive("candidate", "b: rolled back: worker_deaths 2 is over its limit 1.*")
    node.graph.wait_for(
        lambda: any("rolled back" in status.message for array in node.anomalies for status in array.status),
        "the alert",
    )
    node.graph.wait_for(lambda: len(node.workers()) == 1, "the end of the candidate's workers")

    node.next_report()  # it does not come back by itself
    assert node.values("perception")["candidate"].startswith("b: rolled back")
    assert set_parameter("candidate", "").successful
    node.next_report()
    assert set_parameter("candidate_serves", False).successful
    assert set_parameter("candidate", str(candidate)).successful
    drive("candidate", "b: shadow")


@pytest.fixture
def while_driving(node, camera, image, warm_process, tmp_path):
    """Run a command of `torchperf rollout` while frames come.

    Returns exit status, and the last line that it said.
    """

    def run(*words):
        environment = os.environ | {"ROS_DOMAIN_ID": str(node.graph.context.get_domain_id())}
        with (tmp_path / "said").open("w") as prints:
            words = ["rollout", "candidate", *words, "--node", node.name]
            process = warm_process.start("torchperf", words, environment, prints.fileno())
        node.drive(camera, image, lambda: process.poll() is not None, "the end of the command", 240.0)
        return process.returncode, (tmp_path / "said").read_text().strip().splitlines()

    return run


@pytest.mark.timeout(600)
def test_given_the_commands_when_run_then_the_node_does_so_and_they_say_what_serves(
    node, candidate, while_driving, monkeypatch
):
    monkeypatch.setenv("ROS_DOMAIN_ID", str(node.graph.context.get_domain_id()))

    def run(*words):
        result = CliRunner().invoke(app, ["rollout", "candidate", *words, "--node", node.name])
        return result.exit_code, result.output.strip().splitlines()[-1]

    assert run("end") == (0, "perception: version base serves")
    assert run("start", str(candidate)) == (0, "perception: version base serves")
    status, said = while_driving("serve")
    assert (status, said[-1]) == (0, "perception: version b serves")
    # What it waits for is printed only where the frames did not come before the first look.
    text = "of the 50 frames beside the base that it has to have first"
    assert text in "".join(said) or said[0].startswith("perception: b: ")
    assert run("back") == (0, "perception: version base serves")
    assert run("end") == (0, "perception: version base serves")
    status, said = run("end", "--stage", "lidar")
    assert (status, said.endswith("name a stage of the node by --stage")) == (1, True)
    status, said = run("start", __file__)
    assert (status, "is not YAML" in said or "is no mapping" in said) == (1, True)


def test_given_a_candidate_by_hand_whose_outputs_all_differ_when_guarded_then_it_may_stay(candidate):
    values = {"adapter": "adapters_for_graph:Obedient", "output": "point", "candidate": str(candidate)}
    source = ParameterSource("perception", lambda: stage_config("perception", values), lambda: values)
    wish = source.wish()
    assert (wish.serve, wish.beside, wish.candidate) == ("base", "b", "b")
    assert broken_guard(wish.limits, CandidateFigures(compared=5000, disagreements=5000)) == ""
    assert "worker_deaths 2" in broken_guard(wish.limits, CandidateFigures(deaths=2))
    source.rolled_back("worker_deaths 2")
    assert (source.wish().beside, source.wish().why) == ("", "b: worker_deaths 2")


def test_given_a_candidate_that_cannot_be_read_when_set_then_the_parameter_is_refused(
    set_parameter, tmp_path
):
    result = set_parameter("candidate", str(tmp_path / "none.yaml"))
    assert not result.successful
    assert "none.yaml: cannot be read (No such file or directory)" in result.reason
    (tmp_path / "c.yaml").write_text("tiers: [other]")
    assert "tiers cannot be changed" in set_parameter("candidate", str(tmp_path / "c.yaml")).reason


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A folder with keys, and what writes the next signed plan to it."""
    pytest.importorskip("mmh3", reason="mmh3 is not installed")
    from torchperf_ros.fleet.plan import new_plan, utc_now
    from torchperf_ros.fleet.signature import make_keys, read_private_key, sign

    folder = tmp_path_factory.mktemp("fleet")
    make_keys(folder / "key")
    numbers = itertools.count(2026112400)

    def issue(**changes):
        values = {
            "name": "detector",
            "stage": "perception",
            "version": "b",
            "serial": next(numbers),
            "shadow_min": 0,
            "candidate": {"adapter": "adapters_for_graph:Shifted"},
            "steps": [{"share": 100}] * 2,
            **changes,
        }
        plan = sign(new_plan(values, utc_now()), read_private_key(folder / "key"))
        (folder / "new").write_text(plan)
        (folder / "new").replace(folder / "plan.json")

    return folder, issue


@pytest.fixture
def begin(start_node, obedient, image, fleet):
    """Start a node that follows the fleet's plan.

    Gives it, its outputs, and what sends frames until all is said.
    """
    from geometry_msgs.msg import PointStamped
    from sensor_msgs.msg import Image

    def begin(remembered, namespace=None, **changed):
        plan, key, state = (str(fleet[0] / name) for name in ("plan.json", "key.pub", remembered))
        stage = obedient(engine="eager", hang_ms=60_000.0, rollout_plan=plan, **changed)
        options = {"vehicle": "car-7", "key": key}
        parameters = {"stages": ["perception"], "rollout": options, "perception": stage}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", state)
            node = start_node(parameters, namespace=namespace)
        node.wait_until_ready("perception")
        camera = node.publisher("image", Image)
        points = node.graph.listen(f"{node.namespace}/point", PointStamped)

        def until(**said):
            def all_hold():
                values = node.values("perception")
                return all(re.fullmatch(said[key], values.get(key, "")) for key in said)

            node.drive(camera, image, all_hold, lambda: f"{said}: {node.values('perception')}")
            x_of(node, camera, image(), points)

        return node, points, until

    return begin


def test_given_a_signed_plan_when_it_comes_and_changes_then_the_vehicle_follows_it_and_remembers(
    begin, fleet
):
    _, issue = fleet
    node, points, until = begin("state")
    issue(steps=[{"share": 100, "shadow": True}])
    until(candidate="b: shadow")
    assert points[-1].point.x == 64.0
    issue()
    until(version="b")
    assert points[-1].point.x == 64.5
    os.kill(
        node.process.pid, signal.SIGKILL
    )  # it is on trial only, so that the base comes up, and tries again
    node.process.wait()
    node, points, until = begin("state")
    node.wait_for(
        lambda: "version b starts beside base, which serves" in node.errors, "the base to come up"
    )
    until(version="b")
    issue(name="another", version="c")  # another one, while the first is on trial
    until(version="c")
    issue(name="another", version="c", state="rolled_back", revoked=["c"])
    until(version="base")
    until(candidate=".*version c was rolled back here: revoked by serial.*")
    assert points[-1].point.x == 64.0
    assert node.end() == 0
