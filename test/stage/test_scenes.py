"""Which scene a frame gets, and which budget: rules on a virtual clock."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import encode, message_class
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.settings.config import stage_config
from torchperf_ros.settings.stage_options import ODOMETRY
from torchperf_ros.stage.scenes import DEFAULT, SceneChooser, situation_budget_ms
from torchperf_ros.workers.frame_ring import FrameReader

from ..safety.sensor_messages import odometry_bytes
from .conftest import S, wait_until

INTERSECTION, HIGHWAY, PARKING, EMERGENCY = 1, 2, 3, 4
NAMES = ["intersection", "highway", "parking", "emergency"]


def chooser(**values):
    scenes = {
        "scenes": NAMES,
        "scene.intersection.tiers": ["fast"],
        "scene.intersection.topic": "scene",
        "scene.intersection.budget_ms": 30.0,
        "scene.highway.tiers": ["full"],
        "scene.highway.min_speed": 22.0,
        "scene.parking.tiers": ["round", "fast"],
        "scene.parking.max_speed": 3.0,
        "scene.parking.topic": "scene",
        "scene.parking.word": "car park",
        "scene.emergency.tiers": ["fast"],
        "scene.emergency.topic": "alarm",
    }
    found = SceneChooser(stage_config("seen", {"adapter": "a:B", "output": "seen", **scenes, **values}))
    found.loaded([None])
    return found


def word(text):
    return bytes(encode(message_class("std_msgs/msg/String")(data=text), "std_msgs/msg/String"))


@pytest.fixture
def scenes():
    return chooser()


def test_given_a_stage_without_scenes_when_asked_then_it_is_default():
    plain = SceneChooser(stage_config("seen", {"adapter": "a:B", "output": "seen"}))
    plain.moved(30.0, 0)
    assert plain.choose(0) == DEFAULT
    assert plain.config.situation_inputs == ()


HISTORIES = {
    "nothing is known": "0 default",
    "an unknown speed": "0 speed nan default",
    "a speed below the limit": "0 speed 21.9 default",
    "a speed at the limit": "0 speed 22 highway",
    "slow, but no word says that it is a car park": "0 speed 2 default",
    "slow in a car park": "0 speed 2 word car_park parking",
    "too fast for a car park": "0 speed 4 word car_park default",
    "a car park at an unknown speed": "0 word car_park default",
    "a word alone": "0 word intersection intersection",
    "two that hold: the first in the list": "0 speed 30 word intersection intersection",
    "a word of no scene": "0 speed 30 word moon highway",
    "the adapter's word needs no rule": "0 adapter parking parking",
    "a speed of a second ago counts": "0 speed 30 x, 1 highway",
    "an older one does not": "0 speed 30 x, 1.001 default",
    "an active scene lasts within a band": (
        "0 speed 22 highway, 2 speed 21.6 highway, 4 speed 21.4 default, 6 speed 21.6 default"
    ),
    "its tiers are gone: the same frame gets default": "0 speed 30 highway, 0.001 gone - default",
    "an emergency is chosen at once, and left later": (
        "0 speed 30 highway, 0.001 alarm emergency word intersection emergency, 0.002 alarm over emergency,"
        " 1.001 intersection"
    ),
    "only an emergency outranks a forced scene": (
        "0 forced parking speed 30 parking, 0.001 alarm emergency emergency"
    ),
}
"""At which second, what is heard, and the scene that is chosen then; x: none is asked for."""


@pytest.mark.parametrize("case", HISTORIES)
def test_given_a_history_when_asked_then_the_first_scene_that_holds_is_chosen(scenes, case):
    for step in HISTORIES[case].split(", "):
        second, *heard, wanted = step.split()
        at_ns = round(float(second) * S)
        for kind, value in zip(heard[::2], heard[1::2], strict=True):
            hear(scenes, kind, value, at_ns)
        assert wanted == "x" or ["default", *NAMES][scenes.choose(at_ns)] == wanted, step
    assert (scenes.unknown == "moon") is ("moon" in HISTORIES[case])


def hear(scenes, kind, value, at_ns):
    if kind == "speed":
        scenes.moved(float(value), at_ns)
    elif kind == "gone":
        scenes.loaded([])
    elif kind in {"adapter", "forced"}:
        setattr(scenes, {"adapter": "word"}.get(kind, kind), 1 + NAMES.index(value))
    else:
        for number in (INTERSECTION, PARKING) if kind == "word" else (EMERGENCY,):
            scenes.named(number, value.replace("_", " "), at_ns)


def test_given_messages_when_heard_then_speed_in_either_direction_and_words_count_and_others_are_refused(
    scenes,
):
    index = ODOMETRY - INTERSECTION
    assert (index, "scene", "std_msgs/msg/String") in scenes.config.situation_inputs
    scenes.hear(ODOMETRY, odometry_bytes(speed=-30.0), 0)
    assert scenes.choose(0) == HIGHWAY
    said = word(" intersection ")
    scenes.hear(index, said, 0)
    assert scenes.choose(2 * S) == DEFAULT  # both are too old by then
    scenes.hear(index, said, 2 * S)
    assert scenes.choose(3 * S) == INTERSECTION
    with pytest.raises(BadInput, match="Odometry"):
        scenes.hear(ODOMETRY, b"", 0)


def test_given_a_scene_without_rules_when_asked_then_only_the_adapters_word_chooses_it():
    scenes = chooser(scenes=[*NAMES, "night"], **{"scene.night.tiers": ["round"]})
    night = [scene.name for scene in scenes.config.scenes].index("night")
    assert scenes.choose(0) == DEFAULT
    scenes.word = night
    assert scenes.choose(10 * S) == night
    tiers = {tier for number in scenes.to_load() for tier in scenes.config.scenes[number].tiers}
    assert scenes.tiers_to_load() == sorted(tiers)
    assert scenes.config.tiers.index("round") in scenes.tiers_to_load()


def test_given_a_scene_that_is_cold_when_it_holds_then_default_runs_until_it_is_loaded(scenes):
    scenes.loaded([frozenset({0, 1, 2}), frozenset({0, 1, 2, 3})])  # one of two workers has no `round`
    scenes.moved(1.0, 0)
    scenes.named(PARKING, "car park", 0)
    assert (scenes.choose(0), scenes.wanted) == (DEFAULT, PARKING)
    scenes.loaded([None, frozenset({0, 1, 2, 3})])
    assert scenes.choose(1) == PARKING


def test_given_more_scenes_than_may_be_loaded_when_used_then_those_used_last_and_emergency_stay():
    scenes = chooser(scenes_loaded=1)
    assert scenes.to_load() == (DEFAULT, INTERSECTION, EMERGENCY)
    for at_s, word in enumerate((HIGHWAY, PARKING), start=2):
        scenes.word = word
        scenes.choose(at_s * S)
        assert scenes.to_load() == (DEFAULT, word, EMERGENCY)


heard = st.none() | st.floats(0, 40) | st.sampled_from(["intersection", "car park", "over", "x"])
steps = st.lists(
    st.tuples(st.integers(1, 300_000_000), heard, st.integers(-1, 3)), min_size=1, max_size=200
)


@settings(max_examples=200)
@given(steps=steps, hold_s=st.floats(0.1, 5.0))
def test_given_inputs_that_flap_when_chosen_then_scenes_switch_once_in_their_time_and_emergency_at_once(
    steps, hold_s
):
    scenes, now_ns, switches_ns = chooser(scene_hold_s=hold_s), 0, []
    for waited_ns, heard, word in steps:
        now_ns += waited_ns
        scenes.word = word
        if isinstance(heard, float):
            scenes.moved(heard, now_ns)
        elif heard is not None:
            for number in (INTERSECTION, PARKING):
                scenes.named(number, heard, now_ns)
        before = scenes.active
        if scenes.choose(now_ns) != before:
            switches_ns.append(now_ns)
        assert scenes.active in scenes.ready
    gaps = [later - earlier for earlier, later in zip(switches_ns, switches_ns[1:], strict=False)]
    assert all(gap >= hold_s * S for gap in gaps)
    assert scenes.switches == len(switches_ns)
    scenes.named(EMERGENCY, "emergency", now_ns)
    assert scenes.choose(now_ns) == EMERGENCY


# -- a budget that follows speed and time to collision


def config(**values):
    return stage_config(
        "seen", {"adapter": "a:B", "output": "o", "budget_ms": 50.0, "budget_least_ms": 20.0, **values}
    )


@pytest.mark.parametrize(
    ("speed", "ttc_s", "least_ms", "budget_ms"),
    [
        (None, None, 0.0, 50.0),
        (0.0, None, 0.0, 50.0),
        (15.0, None, 0.0, 35.0),
        (30.0, None, 0.0, 20.0),
        (60.0, None, 0.0, 20.0),
        (None, 4.0, 0.0, 50.0),
        (None, 2.0, 0.0, 35.0),
        (None, 0.0, 0.0, 20.0),
        (None, -1.0, 0.0, 20.0),
        (15.0, 3.0, 0.0, 35.0),
        (15.0, 1.0, 0.0, 27.5),
        (30.0, None, 25.0, 25.0),
        (30.0, None, 80.0, 50.0),
    ],
)
def test_given_a_situation_when_asked_then_the_budget_follows_within_its_bounds(
    speed, ttc_s, least_ms, budget_ms
):
    assert situation_budget_ms(config(), 50.0, speed, ttc_s, least_ms) == budget_ms


def test_given_a_budget_that_is_not_to_follow_or_is_shorter_when_asked_then_it_stays():
    assert situation_budget_ms(config(budget_least_ms=0.0), 50.0, 30.0, 0.0, 0.0) == 50.0
    assert situation_budget_ms(config(), 15.0, 30.0, 0.0, 0.0) == 15.0


unknown_or = st.none() | st.floats(0, 100)


@given(
    speed=unknown_or,
    ttc_s=unknown_or,
    faster=st.floats(0, 50),
    nearer=st.floats(0, 50),
    least_ms=st.floats(0, 100),
)
def test_given_more_danger_when_asked_then_the_budget_is_never_longer(
    speed, ttc_s, faster, nearer, least_ms
):
    before = situation_budget_ms(config(), 50.0, speed, ttc_s, least_ms)
    after = situation_budget_ms(
        config(),
        50.0,
        None if speed is None else speed + faster,
        None if ttc_s is None else ttc_s - nearer,
        least_ms,
    )
    assert min(50.0, max(20.0, least_ms)) <= after <= before <= 50.0


def test_given_a_time_to_collision_when_it_is_none_or_old_then_it_is_unknown():
    scenes = SceneChooser(config())
    assert scenes.ttc_s(0) is None
    for value, known in ((1.5, 1.5), (math.nan, None), (math.inf, None)):
        scenes.near(value, 0)
        assert scenes.ttc_s(1_000_000_000) == known
    scenes.near(1.5, 0)
    assert scenes.ttc_s(1_000_000_001) is None


@pytest.mark.parametrize("least_ms", [0.5, 50.1])
def test_given_a_shortest_budget_that_is_none_when_read_then_it_is_refused(least_ms):
    with pytest.raises(
        ConfigError, match=f"budget_least_ms: {least_ms} is not allowed.*0, or from 1 to budget_ms"
    ):
        config(budget_least_ms=least_ms)


def test_given_a_shortest_budget_when_inputs_are_asked_for_then_odometry_is_one():
    assert [topic for _, topic, _ in config().situation_inputs] == ["odom"]


def test_given_words_of_workers_when_an_older_frame_comes_late_or_the_worker_goes_then_the_newest_one_counts():
    scenes = SceneChooser(stage_config("s", {"adapter": "m:C", "output": "o"}))
    first, second = object(), object()
    scenes.name(2, first, 7)
    scenes.name(1, second, 6)
    assert (scenes.word, scenes.word_of) == (2, first)
    scenes.name(-1, second, 8)
    assert (scenes.word, scenes.word_of) == (-1, second)
    scenes.name(1, second, 9)
    scenes.forget_word()
    assert (scenes.word, scenes.word_of) == (-1, None)


TIER_OFFSET = 1000.0
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
    "input_timeout_ms": 600_000.0,
}


def model_of(stage, answer):
    """Which of the adapter's models made the output."""
    return round(stage.payload(answer).poses[0].pose.position.x / TIER_OFFSET)


@pytest.fixture(scope="module")
def stage(start_stage):
    return start_stage(backup="standby", **SCENES)


def settle(stage):
    """Let the hold of the last change pass, and every worker be idle."""
    stage.wait_for_workers()
    over_ns = time.monotonic_ns() + round(SCENES["scene_hold_s"] * S)
    wait_until(lambda: time.monotonic_ns() > over_ns, lambda: "the end of the hold")


def test_given_a_speed_and_a_word_when_frames_come_then_each_scene_has_its_tiers_and_budget_and_nothing_compiles(
    stage,
):
    actor = stage.actor
    for index, data, scene, tier, budget_ms in (
        (ODOMETRY, odometry_bytes(speed=10.0), 0, 0, 5000.0),
        (ODOMETRY, odometry_bytes(speed=30.0), 1, 2, 4000.0),
        (ODOMETRY, odometry_bytes(speed=10.0), 0, 0, 5000.0),
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
    stage.actor.hear(ODOMETRY, odometry_bytes(speed=15.0))
    answer = stage.ask()
    assert answer.budget_ms == 3000.0
    assert answer.frame.deadline_ns - answer.frame.received_ns == 3_000_000_000
    stage.wait_for_workers()
    stage.actor.hear(ODOMETRY, odometry_bytes(speed=45.0))
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
