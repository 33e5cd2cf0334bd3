"""What a machine lacks, by files as a kernel shows them."""

import pytest

from torchperf_ros.observe.doctor.environment import Need, kernel_clock, look_around

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
