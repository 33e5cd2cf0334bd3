"""Which part is the largest, and which advice follows from which evidence."""

import math

import pytest

from torchperf_ros.observe.doctor_rules import (
    MOST_ADVICE,
    Case,
    Need,
    advise,
    kernel_clock,
    look_around,
    sentence,
)
from torchperf_ros.observe.doctor_split import AFTER, PARTS, Part, Split

NOTHING = Part("stamp to arrival", math.nan, math.nan, math.nan, math.nan, 0)


def case(parts, *, frames=300, more=None, stage="seg", **known):
    """A stage whose parts take so many ms, as (p50, p99) or as one number for both."""
    pairs = {name: value if isinstance(value, tuple) else (value, value) for name, value in parts.items()}
    whole = [sum(pairs[name][place] for name in pairs if name not in AFTER) for place in (0, 1)]
    made = tuple(
        Part(name, *pairs[name], pairs[name][0], pairs[name][0] / whole[0] if whole[0] else 0.0, frames)
        for name in PARTS
        if name in pairs
    )
    age_ms = sum(pairs.get(name, (0.0, 0.0))[0] for name in ("camera", "transport", "input"))
    split = Split(
        stage, frames, made, Part("whole", *whole, whole[0], 1.0, frames), NOTHING, age_ms, **(more or {})
    )
    usual = {
        "budget_ms": 50.0,
        "interval_ms": 33.0,
        "trigger": "/image",
        "driver": "/cam",
        "output": "/labels",
    }
    return Case(split, **usual | known)


RECEIPT = {"budget_from": "receipt"}
# what is known, and of the advice that comes first: the part, what it may save, and what to type
EVIDENCE = [
    ("an old image", case({"camera": 80.0, "inference": 10.0}), ("camera", 47.0, "ros2 param dump /cam")),
    ("an old image in a log", case({"input": 80.0, "inference": 10.0}), ("input", 47.0, "torchperf doctor --node")),
    ("a long exposure", case({"camera": 30.0, "inference": 10.0}), None),  # within a frame's interval
    (
        "a budget that begins late", case({"camera": 30.0, "inference": 45.0}, parameters=RECEIPT),
        ("inference", 25.0, "seg.budget_from: stamp"),
    ),
    ("a budget that is over before receipt", case({"camera": 30.0, "inference": 45.0}, budget_ms=25.0,
                                                  parameters=RECEIPT), None),
    ("a budget from the stamp", case({"camera": 30.0, "inference": 45.0}, parameters={"budget_from": "stamp"}), None),
    (
        "large messages that are lost",
        case({"transport": 2.0, "inference": 10.0}, message_bytes=2_760_000, more={"published": 100, "lost": 50}),
        ("transport", 16.5, "export FASTDDS_DEFAULT_PROFILES_FILE="),
    ),
    (
        "small messages that are lost",
        case({"transport": 2.0, "inference": 10.0}, message_bytes=900, more={"published": 100, "lost": 50}),
        ("transport", 16.5, "seg.input_reliability: reliable"),
    ),
    (
        "messages that are sent again", case({"transport": (1.0, 30.0)}, parameters={"input_reliability": "reliable"}),
        ("transport", 29.0, "seg.input_reliability: best_effort"),
    ),
    (
        "large messages that take long", case({"transport": 25.0}, message_bytes=6_000_000),
        ("transport", 20.0, "ros2 run image_transport republish raw compressed"),
    ),
    (
        "a node of normal priority", case({"transport": (1.0, 9.0), "publish": (1.0, 5.0)}, scheduling="nice -10"),
        ("transport", 12.0, "rtprio 98"),
    ),
    ("a node under SCHED_FIFO", case({"transport": (1.0, 9.0), "publish": (1.0, 5.0)}, scheduling="fifo 10"), None),
    (
        "a stage that is busy", case({"queue": 20.0, "inference": 40.0}, tier="full", tiers={"full": 40, "fast": 39.5}),
        ("queue", 20.0, "seg.tiers: [fast]"),
    ),
    (
        "an input that is waited for", case({"queue": 20.0, "inference": 15.0}, waited={"cloud": (300, 5700.0)}),
        ("queue", 19.0, "seg.sync: ['cloud slop 40 wait 10']"),
    ),
    (
        "a stage of higher priority",
        case({"queue": 8.0, "inference": 15.0}, parameters={"priority": 0}, highest_priority=2),
        ("queue", 8.0, "seg.priority: 2"),
    ),
    ("frames in bunches", case({"queue": (0.0, 12.0), "inference": 9.0}), ("queue", 12.0, "ros2 topic hz /image")),
    ("a slow run that makes the next frame wait", case({"queue": (0.0, 12.0), "inference": (9.0, 45.0)}), None),
    (
        "a cheaper tier", case({"inference": 20.0}, tier="full", tiers={"full": 20.0, "medium": 21.0, "fast": 5.0}),
        ("inference", 15.0, "seg.tiers: [fast]"),
    ),
    ("a model in eager", case({"inference": 20.0}, engine="eager"), ("inference", 10.0, "torchperf compile")),
    (
        "too many threads",
        case({"inference": (10.0, 40.0)}, device="cpu", cores=8, stages=2, parameters={"worker_threads": 0}),
        ("inference", 30.0, "worker_threads: 3"),
    ),
    ("a full machine", case({"inference": (10.0, 40.0)}, lacks=frozenset({"load"})), ("inference", 30.0, "top -o")),
    (
        "a governor that saves power", case({"inference": (10.0, 14.0)}, lacks=frozenset({"governor"})),
        ("inference", 4.0, "cpupower frequency-set -g performance"),
    ),
    ("a GPU", case({"inference": (10.0, 40.0)}, device="cuda:0", lacks=frozenset({"load", "governor"})), None),
    ("a slow preprocess", case({"preprocess": 12.0}), ("preprocess", 6.0, "torchperf profile --node /perf")),
    ("outputs that arrive late", case({"inference": 9.0, "receive": 7.0}), ("receive", 7.0, "torchperf top")),
    (
        "a slow receiver", case({"inference": 9.0, "actuation": 60.0}, actuation="/cmd"),
        ("actuation", 60.0, "QoSProfile(depth=1"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "first"), [row[1:] for row in EVIDENCE], ids=[row[0] for row in EVIDENCE]
)
def test_given_evidence_when_advised_then_what_follows_from_it_comes_first_and_nothing_without_it(
    known, first
):
    advice = advise([known])
    if first is None:
        assert advice == []
        return
    assert (advice[0].part, pytest.approx(advice[0].saves_ms)) == first[:2]
    assert first[2] in advice[0].command
    assert advice[0].do
    assert "nan" not in advice[0].because


def test_given_much_to_change_in_two_stages_when_advised_then_the_five_that_may_save_the_most_are_sorted():
    parts = {
        "camera": 80.0,
        "queue": 20.0,
        "preprocess": 30.0,
        "inference": (40.0, 90.0),
        "actuation": 60.0,
    }
    cases = [
        case(parts, stage=stage, engine="eager", lacks=frozenset({"load", "governor"})) for stage in "ab"
    ]
    saves = [one.saves_ms for one in advise(cases)]
    assert len(saves) == MOST_ADVICE
    assert saves == sorted(saves, reverse=True)


def test_given_one_thing_to_change_in_several_streams_when_advised_then_it_is_said_once_of_the_worst():
    streams = [
        case({"inference": ms}, stage=f"seg.{stream}", engine="eager")
        for stream, ms in (("front", 20.0), ("left", 40.0), ("rear", 30.0))
    ]
    (advice,) = [one for one in advise([*streams, case({"inference": 9.0})]) if one.part == "inference"]
    assert (advice.stage, advice.saves_ms) == ("seg.left and rear, front", 20.0)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            case({"camera": 75.0, "inference": 25.0}),
            "seg: the largest part is camera, 75.0 of 100.0 ms (75%)",
        ),
        (case({"inference": 5.0, "actuation": 60.0}), "actuation, 60.0 ms after the output left"),
        (
            case({"camera": 75.0, "queue": 25.0}, more={"slow_part": "queue", "slow_ms": 30.0}),
            "; the slowest 5 % are slow by queue, +30.0 ms",
        ),
        (case({}, frames=0), "seg: no frame was answered, so nothing can be split"),
    ],
)
def test_given_parts_when_put_into_a_sentence_then_the_largest_is_named(known, said):
    assert said in sentence(known.split)


MIB = 1 << 20


@pytest.fixture
def root(tmp_path):
    """A machine on which nothing is missing."""
    machine = {
        "proc/7/limits": limits(rtprio="98", memlock="unlimited"),
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "proc/sys/net/core/rmem_max": "8388608\n",
    }
    for name, text in machine.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    segment(tmp_path, 64 * MIB)
    return tmp_path


def limits(rtprio, memlock):
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         {memlock:20} unlimited            bytes     \n"
        f"Max realtime priority     {rtprio:20} 98                   \n"
    )


def segment(root, size):
    file = root / "dev/shm/fastdds_0123456789abcdef"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.truncate(size)


NEED = {"pid": 7, "scheduling": "", "lock_memory": True, "message_bytes": 3 * MIB, "busy": 0.2}


def test_given_a_machine_that_lacks_nothing_when_looked_at_then_all_is_well(root):
    assert [check.name for check in look_around(Need(**NEED), root, lambda: 0) if not check.ok] == []


@pytest.mark.parametrize(
    ("name", "spoil", "need", "mend"),
    [
        (
            "rtprio",
            lambda root: (root / "proc/7/limits").write_text(limits("0", "unlimited")),
            {},
            "rtprio 98",
        ),
        (
            "memlock",
            lambda root: (root / "proc/7/limits").write_text(limits("98", "65536")),
            {},
            "memlock unlimited",
        ),
        (
            "governor",
            lambda root: (root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").write_text(
                "powersave\n"
            ),
            {},
            "cpupower",
        ),
        ("load", lambda _: None, {"busy": 0.97}, "top -o %CPU"),
        ("segment", lambda root: segment(root, MIB // 2), {}, "FASTDDS_DEFAULT_PROFILES_FILE"),
        ("segment", lambda _: None, {"lost": 3}, "FASTDDS_DEFAULT_PROFILES_FILE"),
        (
            "segment",
            lambda _: None,
            {"unheard": "/image", "message_bytes": 0},
            "FASTDDS_DEFAULT_PROFILES_FILE",
        ),
        ("clock", lambda _: None, {"clock_ms": -35.0}, "chronyc tracking"),
        ("clock", lambda _: None, {"clock_ms": 9.6e10}, "torchperf play LOG --restamp"),
        (
            "clock",
            lambda _: None,
            {"clock_ms": -35.0, "clock_problem": "no node publishes /clock"},
            "use_sim_time",
        ),
    ],
)
def test_given_one_thing_that_is_missing_when_looked_at_then_it_alone_is_lacking(
    root, name, spoil, need, mend
):
    spoil(root)
    (lacking,) = [check for check in look_around(Need(**NEED | need), root, lambda: 0) if check.ok is False]
    assert lacking.name == name
    assert mend in lacking.mend


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("rtprio", {"realtime_priority": 0}),
        ("memlock", {"lock_memory": False}),
        ("load", {"busy": float("nan")}),
    ],
)
def test_given_what_does_not_matter_here_when_looked_at_then_it_is_neither(root, name, need):
    checks = {check.name: check.ok for check in look_around(Need(**NEED | need), root, lambda: 5)}
    assert (checks[name], checks["clock"]) == (
        None,
        None,
    )  # a clock that nobody sets matters between machines only


def test_given_a_node_that_runs_in_real_time_when_looked_at_then_its_limit_does_not_matter(root):
    (root / "proc/7/limits").write_text(limits("0", "unlimited"))
    checks = look_around(Need(**NEED | {"scheduling": "fifo 10"}), root, lambda: 0)
    assert checks[0].ok


def test_given_this_machine_when_looked_at_then_nothing_raises():
    assert len(look_around(Need())) == 8
    assert kernel_clock() in {-1, 0, 1, 2, 3, 4, 5}
