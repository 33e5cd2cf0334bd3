"""Evidence from a running node, by its services."""

from pathlib import Path

import pytest

from torchperf_ros.frame.outcome import Outcome

pytestmark = pytest.mark.ros


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def node(start_node, fast, folder):
    node = start_node({
        "stages": ["perception"], "evidence_dir": str(folder),
        "perception": fast(backup="standby", engine="eager", hang_ms=60_000.0, budget_ms=10_000.0),
    })  # fmt: skip
    node.wait_until_ready("perception")
    return node


def test_given_a_node_with_a_standby_when_profiled_then_frames_go_on_and_diagnostics_say_where_it_is(
    node, folder, image
):
    from sensor_msgs.msg import Image
    from std_srvs.srv import Trigger

    camera = node.publisher("image", Image)
    node.answer(camera, image())
    assert node.call(Trigger, "profile", Trigger.Request()).success
    said = node.call(Trigger, "profile", Trigger.Request())
    assert not said.success
    assert "stage perception is busy with one already (profile" in said.message
    rows = []
    while not node.values("perception")["evidence"]:
        rows.append(node.answer(camera, image()))
    path, _, summary = node.values("perception")["evidence"].partition(": ")
    assert Path(path).parent == folder
    assert (Path(path) / "trace.json.gz").is_file()
    assert "frames of" in summary
    assert {Outcome(int(row["outcome"])) for row in rows} == {Outcome.ON_TIME}
    assert {int(node.values("perception")[key]) for key in ("restarts", "missed_deadline")} == {0}
    assert {"memory_growth_mib_per_hour", "memory_exhausted_in_s"} <= node.values("perception").keys()
    assert "memory_growth_mib_per_hour" in node.values("node")
