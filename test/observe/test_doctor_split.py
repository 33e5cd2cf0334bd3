"""The parts of frames' time, from rows and from what another subscriber heard."""

import numpy as np
import pytest

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.doctor_split import Heard, Message, split
from torchperf_ros.observe.runs.run_log import StageLog
from torchperf_ros.stage.frame_table import FRAME

MS = 1_000_000
START_NS = 1_700_000_000_000 * MS
EVERY_MS = 50
STEPS = {
    "wait_ms": 1.0,
    "decode_ms": 0.5,
    "preprocess_ms": 2.0,
    "inference_ms": 20.0,
    "postprocess_ms": 0.5,
}


def stage(count=40, **columns):
    """Frames of 25 ms that were received 12 ms after their stamps; other columns as they are given."""
    frames = np.zeros(count, dtype=FRAME)
    values = {
        "seq": np.arange(count),
        "stamp_ns": START_NS + np.arange(count) * EVERY_MS * MS,
        "age_ms": 12.0,
    }
    for name, value in {**values, **STEPS, "total_ms": 25.0, **columns}.items():
        frames[name] = value
    return StageLog("seg", ("full",), frames)


def triggers(count=40, *, camera_ms=10.0, lost=()):
    """As another subscriber has them, without those that were lost."""
    stamps = [START_NS + number * EVERY_MS * MS for number in range(count)]
    return [
        Message(stamp, stamp + round(camera_ms * MS), stamp + 13 * MS, number, 1000)
        for number, stamp in enumerate(stamps)
        if number not in lost
    ]


def p50(found):
    return {part.name: pytest.approx(part.p50_ms, abs=1e-3) for part in found.parts}


def test_given_a_log_when_split_then_camera_and_transport_are_one_part_and_the_shares_add_up():
    found = split(stage())
    assert p50(found) == {
        "input": 12.0,
        "queue": 1.0,
        "decode": 0.5,
        "preprocess": 2.0,
        "inference": 20.0,
        "postprocess": 0.5,
        "publish": 1.0,
    }
    assert found.whole.p50_ms == pytest.approx(37.0)
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    assert found.largest.name == "inference"
    assert split(stage(), handed_over=True).part("before").p50_ms == pytest.approx(12.0)


def test_given_what_another_subscriber_heard_when_split_then_camera_transport_and_what_follows_are_there():
    outputs = [
        Message(one.stamp_ns, one.stamp_ns + 40 * MS, one.stamp_ns + 43 * MS, 0, 9) for one in triggers()
    ]
    acts = [one._replace(sent_ns=one.stamp_ns + 100 * MS) for one in outputs]
    found = split(stage(), Heard(triggers(), outputs, acts))
    parts = p50(found)
    assert (parts["camera"], parts["transport"]) == (10.0, 2.0)
    assert (parts["receive"], parts["actuation"]) == (3.0, 60.0)
    assert found.arrival.p50_ms == pytest.approx(43.0)
    assert found.largest.name == "actuation"
    assert (found.published, found.lost) == (39, 0)


def test_given_triggers_that_came_to_nobody_when_split_then_they_are_lost_and_those_that_the_node_replaced_are_not():
    missing = {5, 6, 7, 8}
    numbers = np.array([number for number in range(40) if number not in missing | {20}])
    rows = stage(
        len(numbers), stamp_ns=START_NS + numbers * EVERY_MS * MS
    )  # 20 came here, and not to the node
    found = split(rows, Heard(triggers(lost=missing)))
    assert (found.published, found.lost) == (39, 4)


@pytest.mark.parametrize(
    ("columns", "heard", "sim_time", "says", "clock_ms"),
    [
        ({"age_ms": np.nan}, triggers(), False, "40 of 40 frames have no stamp", np.nan),
        ({"age_ms": -35.0}, triggers(), False, "lie in the future or more than 10 s back", -35.0),
        (
            {"age_ms": 3_600_000.0},
            triggers(),
            False,
            "lie in the future or more than 10 s back",
            3_600_000.0,
        ),
        ({}, triggers(camera_ms=-30.0), False, "is sent, or received, 30.0 ms before its time", -30.0),
        ({}, triggers(camera_ms=40.0), False, "is sent, or received, 28.0 ms before its time", -28.0),
        ({}, triggers(), True, "use_sim_time", np.nan),
    ],
)
def test_given_stamps_that_cannot_be_right_when_split_then_it_says_so_and_splits_no_camera(
    columns, heard, sim_time, says, clock_ms
):
    found = split(stage(**columns), Heard(heard), sim_time=sim_time)
    assert says in found.notes[0]
    assert found.part("camera").count == 0
    assert found.clock_ms == pytest.approx(clock_ms, nan_ok=True)


def test_given_results_that_came_too_late_when_split_then_the_wait_for_them_is_the_model_s():
    nothing = dict.fromkeys(STEPS, np.nan) | {"wait_ms": 1.0, "outcome": Outcome.LATE, "total_ms": 50.0}
    assert split(stage(**nothing)).part("inference").p50_ms == pytest.approx(49.0)


def test_given_few_frames_that_wait_long_when_split_then_the_slow_ones_are_slow_by_the_queue():
    waits = np.where(np.arange(40) % 20 == 7, 31.0, 1.0)
    found = split(stage(wait_ms=waits, total_ms=24.0 + waits))
    assert (found.largest.name, found.slow_part, found.slow_ms) == (
        "inference",
        "queue",
        pytest.approx(30.0),
    )


def test_given_no_frames_when_split_then_there_is_no_part():
    found = split(stage(outcome=Outcome.STARTING))
    assert (found.frames, found.largest) == (0, None)
