"""A stage with scenes and real workers.

A scene's tiers and budget count from the frame on that it is chosen for.
"""

import struct
import time

import pytest
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.settings.scene_options import ODOMETRY
from torchperf_ros.workers.frame_ring import FrameReader

from .conftest import wait_until

STORE = get_typestore(Stores.ROS2_HUMBLE)
TIER_OFFSET = 1000.0
S = 1_000_000_000
SCENES = {
    "tiers": ["full", "fast"],
    "scenes": ["highway", "parking"],
    "scene_hold_s": 0.1,
    "budget_ms": 5000.0,
    "scene.highway.tiers": ["far", "fast"],
    "scene.highway.min_speed": 22.0,
    "scene.highway.budget_ms": 4000.0,
    "scene.parking.tiers": ["round"],
    "scene.parking.topic": "scene",
    "options": {"tiers": ["full", "fast", "far", "round"]},
    "adapter": "NamesScenes",
    "situation_timeout_ms": 600_000.0,
}


def odometry(speed):
    """At that speed in m/s straight ahead.

    A frame name of 3 and no child frame, all other numbers are 0.
    """
    header = bytes(8) + b"\x04\x00\x00\x00map\x00" + b"\x01\x00\x00\x00\x00" + bytes(3)
    return (
        b"\x00\x01\x00\x00" + header + struct.pack("<85d", *[0.0] * 6, 1.0, *[0.0] * 36, speed, *[0.0] * 41)
    )


def word(text):
    return bytes(STORE.serialize_cdr(STORE.types["std_msgs/msg/String"](data=text), "std_msgs/msg/String"))


def model_of(stage, answer):
    """Which of the adapter's models made the output."""
    return round(stage.payload(answer).poses[0].pose.position.x / TIER_OFFSET)


@pytest.fixture(scope="module")
def stage(start_stage):
    return start_stage(backup="standby", **SCENES)


def settle(stage):
    """Let the hold of the last change pass, and every worker be idle."""
    stage.wait_for_workers()
    time.sleep(0.11)


def test_given_a_speed_and_a_word_when_frames_come_then_each_scene_has_its_tiers_and_budget_and_nothing_compiles(
    stage,
):
    actor = stage.actor
    for index, data, scene, tier, budget_ms in (
        (ODOMETRY, odometry(10.0), 0, 0, 5000.0),
        (ODOMETRY, odometry(30.0), 1, 2, 4000.0),
        (ODOMETRY, odometry(10.0), 0, 0, 5000.0),
        (ODOMETRY - 2, word("parking"), 2, 3, 5000.0),
        (ODOMETRY - 2, word("over"), 0, 0, 5000.0),
    ):
        settle(stage)
        actor.hear(index, data)
        answer = stage.ask()
        assert (answer.outcome, answer.frame.scene, answer.tier) == (
            Outcome.ON_TIME,
            scene,
            tier,
        ), answer.reason
        assert answer.budget_ms == budget_ms
        assert model_of(stage, answer) == tier
    assert stage.health is Health.NOMINAL  # the best tier of a scene is no lower one
    assert [row["recompiles"] for row in actor.pool.tally.rows(actor.pool.everyone)] == [0] * 4
    assert actor.scenes.switches == 4
    assert actor.ladder.tiers == (0, 1)


def test_given_the_adapters_own_word_when_it_names_a_scene_then_the_next_frame_is_answered_for_it(stage):
    settle(stage)
    first = stage.ask({"do": "name", "scene": "parking", "once": False})
    settle(stage)
    second = stage.ask({"do": "name", "scene": "mars", "once": False})
    settle(stage)
    third = stage.ask()
    assert [answer.frame.scene for answer in (first, second, third)] == [0, 2, 0]
    wait_until(lambda: any("'mars'" in alert.message for alert in stage.anomalies), lambda: stage.anomalies)


def test_given_odometry_that_is_none_when_heard_then_it_is_counted_and_changes_nothing(stage):
    before = stage.counters.refused_inputs
    stage.actor.hear(ODOMETRY, b"nonsense")
    assert stage.counters.refused_inputs == before + 1


def test_given_more_scenes_than_may_be_loaded_when_a_cold_one_holds_then_default_runs_and_it_is_loaded_beside(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr("torchperf_ros.workers.rolling_update._SETTLE_NS", 0)
    stage = start_own_stage(backup="none", **{**SCENES, "scenes_loaded": 1})
    (first,) = stage.pids
    tiers = stage.actor.pool.everyone[0].loaded
    assert tiers == {0, 1, 2}
    assert stage.actor.pool.loaded_tiers == ["full", "fast", "far"]
    stage.actor.hear(ODOMETRY - 2, word("parking"))
    answer = stage.ask()
    assert (answer.outcome, answer.frame.scene, answer.tier) == (Outcome.ON_TIME, 0, 0)
    wait_until(
        lambda: stage.ask() and stage.actor.scenes.ready == {0, 2}, lambda: stage.actor.pool.progress
    )
    settle(stage)
    answer = stage.ask()
    assert (answer.outcome, answer.frame.scene, answer.tier) == (Outcome.ON_TIME, 2, 3)
    assert model_of(stage, answer) == 3
    assert stage.pids != [first]
    assert stage.actor.pool.everyone[0].loaded == {0, 1, 3}
    assert stage.actor.pool.loaded_tiers == ["full", "fast", "round"]
    assert any("parking is not loaded" in alert.message for alert in stage.anomalies)
    assert any("parking is not loaded" in text for _, text in stage.logs)


def test_given_alerts_with_actions_then_the_stage_works_as_they_say_and_as_before_afterwards(
    start_own_stage,
):
    lines = [
        "drift -> lower_tier",
        "load -> lower_rate",
        "gpu -> scene parking",
        "misses -> backup_active",
        "age -> off",
    ]
    stage = start_own_stage(backup="standby", **{**SCENES, "actions": lines, "action_return_s": 10.0})
    actor, now_ns = stage.actor, time.monotonic_ns()

    def found(name, at_s):
        actor.actions.report(Alert(Level.WARN, name, ""), now_ns + at_s * S)
        actor.act(now_ns + at_s * S)

    found("tested: drift", 0)
    assert stage.ask().tier == 1
    assert "left out as an alert's action" in actor.ladder.explain(actor.config.tiers, now_ns)
    found("machine: gpu", 1)
    settle(stage)
    assert (stage.ask().frame.scene, actor.scenes.wanted) == (2, 2)
    backups = stage.counters.backups
    found("tested: misses", 2)
    settle(stage)
    stage.ask()
    assert stage.counters.backups == backups + 1
    found("machine: load", 3)
    superseded, offered = actor.mailbox.superseded, 0
    while offered < 4:
        stage.wait_for_workers()
        stage.offer()
        offered += 1
    stage.wait_for_workers()
    assert actor.mailbox.superseded == superseded + 2
    found("tested: age", 4)
    while stage.counters.frames & 1:  # the lower rate would take it
        stage.offer()
    answer = stage.ask()
    assert (answer.outcome, answer.fallback) == (Outcome.BAD_INPUT, Fallback.HOLD_LAST)
    assert "age -> off" in answer.reason
    (seen,) = FrameReader(actor.pool.ring.fd).read(answer.offset, answer.length, answer.frame.seq)
    assert header_stamp_ns(seen.data) == answer.frame.stamp_ns  # the inputs are watched while no model runs
    for second in range(5, 60):
        actor.act(now_ns + second * S)
    settle(stage)
    answer = stage.ask()
    assert (answer.outcome, answer.frame.scene) == (Outcome.ON_TIME, 0)
    assert actor.actions.words(now_ns) == ""
    stage.wait_for(
        lambda: len([one for one in stage.anomalies if one.name == "tested: action"]) == 10, "its steps"
    )
    stage.settle_accounts()


def test_given_a_waiting_frame_when_its_scene_is_gone_by_its_turn_then_default_runs_it(stage):
    settle(stage)
    stage.actor.hear(ODOMETRY - 2, word("parking"))
    ready = stage.actor.scenes.ready
    with stage.running(once=False) as (first, _):
        second, _ = stage.offer()
        with stage.actor.lock:
            stage.actor.scenes.ready = frozenset({0, 1})
    found = [stage.answer(seq) for seq in (first, second)]
    stage.actor.scenes.ready = ready
    assert [(answer.outcome, answer.frame.scene, answer.tier) for answer in found] == [
        (Outcome.ON_TIME, 2, 3),
        (Outcome.ON_TIME, 0, 0),
    ]
    stage.actor.hear(ODOMETRY - 2, word("over"))


def test_given_a_shortest_budget_when_the_vehicle_is_fast_then_frames_have_less_time(start_own_stage):
    stage = start_own_stage(backup="none", budget_least_ms=1000.0)
    assert stage.ask().budget_ms == 5000.0
    stage.wait_for_workers()
    stage.actor.hear(ODOMETRY, odometry(15.0))
    answer = stage.ask()
    assert answer.budget_ms == 3000.0
    assert answer.frame.deadline_ns - answer.frame.received_ns == 3_000_000_000
    stage.wait_for_workers()
    stage.actor.hear(ODOMETRY, odometry(45.0))
    assert stage.ask().budget_ms == 1000.0
    assert stage.actor.budget_ms == 1000.0


def test_given_a_worker_that_named_a_scene_when_it_dies_then_the_scene_goes_with_it(start_own_stage):
    stage = start_own_stage(backup="none", **SCENES)
    stage.ask({"do": "name", "scene": "parking", "once": False})
    wait_until(lambda: stage.actor.scenes.word == 2, lambda: stage.actor.scenes.word)
    assert (
        stage.ask({"do": "os_exit"}).frame.scene == 2
    )  # the tiers of that scene may be what ends its workers
    wait_until(lambda: stage.actor.pool.restarts, lambda: stage.actor.pool.progress)
    assert stage.actor.scenes.word == -1
    settle(stage)
    assert stage.ask().frame.scene == 0


def test_given_an_old_frame_that_is_run_once_more_when_it_shows_another_scene_then_that_is_not_the_scene_now(
    start_own_stage, monkeypatch
):
    monkeypatch.setattr("torchperf_ros.stage.practice.REHEARSE_AFTER_NS", 0)
    stage = start_own_stage(backup="standby", **SCENES)
    stage.wait_for_workers()
    said = []
    monkeypatch.setattr(stage.actor.scenes, "name", lambda *of: said.append(of))
    answer = stage.ask({"do": "name", "scene": "parking", "once": False})
    wait_until(lambda: stage.counters.rehearsals == 1, lambda: stage.counters)
    stage.wait_for_workers()
    assert [(scene, seq) for scene, _, seq in said] == [(2, answer.frame.seq)]
