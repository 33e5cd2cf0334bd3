"""Typed messages between node and worker: they arrive as they were, and nothing else is taken."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.settings.shape_options import ShapeOptions
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.control import (
    COMMANDS,
    REPORTS,
    BeginCapture,
    EndCapture,
    LastWords,
    MemoryReport,
    Ready,
    TierFacts,
    TierReport,
    pack_message,
    pack_readable,
    unpack_message,
)
from torchperf_ros.workers.incident_folder import EvidenceLimits
from torchperf_ros.workers.protocol import VERSION
from torchperf_ros.workers.worker_setup import WorkerSetup

FACTS = TierFacts("full", "aoti", hits=3, waste=0.5)
READY = Ready((Calibration(1.0, 2.5),), (FACTS,), ("fast",))
SETUP = WorkerSetup(
    stage="seeing",
    adapter="a:B",
    options={"a": [1, {"b": None}]},
    tiers=("full", "fast"),
    build=(BuildOptions(), BuildOptions("aoti", cuda_graphs=True)),
    packages=("", "/there/fast.pt2"),
    loaded=(0, 1),
    lower=(1, -1),
    shapes=ShapeOptions("bucket", 16, (((1, 3, 8, 8), (1, 6)),)),
    evidence=EvidenceLimits("there", 64),
    calibrations=(Calibration(1.0, 2.0),) * 2,
    swapped=1,
)


def test_given_a_setup_when_sent_then_it_arrives_as_it_was():
    assert unpack_message(pack_message(SETUP), WorkerSetup) == SETUP


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(REPORTS).flatmap(st.from_type))
def test_given_any_report_when_sent_then_it_arrives_as_it_was(report):
    # nan is not equal to itself
    assert repr(unpack_message(pack_message(report), *REPORTS)) == repr(report)


@pytest.mark.parametrize("command", [BeginCapture("profile", EvidenceLimits("there", 64)), EndCapture()])
def test_given_a_command_when_sent_then_it_arrives_as_it_was(command):
    assert unpack_message(pack_message(command), *COMMANDS) == command


def test_given_a_report_with_long_texts_when_sent_for_people_then_their_ends_arrive():
    facts = TierFacts("full", "eager", guards="guard " * 20_000)
    found = unpack_message(pack_readable(TierReport((facts,), 0)), *REPORTS)
    assert found.tiers[0].guards.endswith("guard guard ")


def changed(message, **fields):
    return json.dumps({**json.loads(pack_message(message)), **fields}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(READY, kind="Nonsense"), "unknown control message 'Nonsense'; it has to be one of Desc"),
        (changed(READY, kind="EndCapture"), "unknown control message 'EndCapture'"),
        (changed(READY, missing="fast"), "Ready.missing is 'fast'"),
        (changed(READY, missing=[1]), "Ready.missing is '1'"),
        (changed(READY, calibrations=[{"median_ms": "1", "p99_ms": 1}]), "Ready.calibrations.median_ms"),
        (changed(READY, calibrations=[{"median_ms": 1.0}]), "Ready.calibrations has the fields median_ms"),
        (changed(READY, more=1), "Ready has the fields .*, more: 'more'"),
        (changed(MemoryReport({}), bytes={"kept": 1.5}), "MemoryReport.bytes.kept is '1.5'"),
        (changed(LastWords("x"), permanent=1), "LastWords.permanent is '1'"),
        (json.dumps({"version": VERSION, "kind": "Progress"}).encode(), "Progress has the fields "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_given_what_is_none_of_its_fields_when_received_then_the_error_names_it(data, said):
    with pytest.raises(ProtocolError, match=said):
        unpack_message(data, *REPORTS)
