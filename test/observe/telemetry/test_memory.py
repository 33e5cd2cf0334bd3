"""Memory of the node and its workers, as one sample and laid out for its topic."""

import math
import mmap
import os
import pickle
import subprocess
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.alert import Level
from torchperf_ros.observe.telemetry.memory import (
    LABELS,
    MemoryTrend,
    MemoryUse,
    MemoryWatch,
    ProportionalMemory,
    sample_memory,
)
from torchperf_ros.stage.trend import theil_sen_slope
from torchperf_ros.workers.worker_process import WorkerWords

MIB = 1 << 20


def worker(pid, **by_workers):
    return SimpleNamespace(pid=pid, reported=WorkerWords(memory_bytes=by_workers), state="idle")


def test_given_a_sample_on_the_cpu_when_laid_out_then_what_is_not_measured_is_nan():
    row = dict(zip(LABELS, MemoryUse(10 * MIB, {1: 20 * MIB, 2: 5 * MIB}, {}, 3 * MIB).row(), strict=True))
    assert (row["node_rss_mib"], row["workers_rss_mib"], row["shared_memory_mib"]) == (10.0, 25.0, 3.0)
    unknown = ("cuda_allocated_mib", "cuda_reserved_mib", "cuda_free_mib", "history_mib")
    assert all(math.isnan(row[label]) for label in unknown)


def test_given_a_sample_with_everything_when_laid_out_then_sizes_are_in_mib_and_counts_are_counts():
    by_workers = {"peak": 9 * MIB, "inactive_split": 2 * MIB, "retries": 3, "ooms": 1, "kept": 6 * MIB}
    use = MemoryUse(
        10 * MIB, {1: 20 * MIB, 2: 5 * MIB}, by_workers, 0, {os.getpid(): 8 * MIB, 1: 12 * MIB, 2: 4 * MIB}
    )
    row = dict(zip(LABELS, use.row(), strict=True))
    assert (row["node_pss_mib"], row["workers_pss_mib"]) == (8.0, 16.0)
    assert (row["cuda_peak_mib"], row["cuda_inactive_split_mib"]) == (9.0, 2.0)
    assert (row["cuda_alloc_retries"], row["cuda_out_of_memory"], row["workers_kept_mib"]) == (3, 1, 6.0)
    one_unread = MemoryUse(0, {1: MIB, 2: MIB}, {}, 0, {1: MIB})
    assert math.isnan(dict(zip(LABELS, one_unread.row(), strict=True))["workers_pss_mib"])


def test_given_a_sample_when_asked_for_the_headline_then_it_is_device_memory_on_cuda_and_resident_memory_else():
    assert MemoryUse(0, {1: 20 * MIB}, {"history": MIB}, 0).workers_mib == 20.0
    assert MemoryUse(0, {1: 20 * MIB}, {"allocated": 7 * MIB, "history": MIB}, 0).workers_mib == 7.0


def test_given_memory_that_torch_keeps_for_its_next_tensors_when_asked_then_it_is_not_in_use():
    by_workers = {"allocated": 10 * MIB, "reserved": 60 * MIB, "free": 35 * MIB, "total": 100 * MIB}
    assert MemoryUse(0, {}, by_workers, 0).used_share(0) == pytest.approx(0.15)


def test_given_workers_when_sampled_then_what_they_tell_adds_up_but_for_the_free_memory_that_they_share(
    make_stage,
):
    first = worker(os.getpid(), allocated=MIB, reserved=2 * MIB, free=100 * MIB, history=5)
    second = worker(os.getppid(), allocated=3 * MIB, reserved=4 * MIB, free=90 * MIB, history=6)
    use = sample_memory([make_stage(workers=(first, None)), make_stage("planning", workers=(second,))])
    assert use.by_workers == {"allocated": 4 * MIB, "reserved": 6 * MIB, "free": 90 * MIB, "history": 11}
    assert use.shared == 2 * (3 << 20)
    assert use.rss_by_pid.keys() == {os.getpid(), os.getppid()}
    assert 0.5 < use.node_rss / psutil.Process().memory_info().rss < 2.0


def test_given_shared_memory_when_sampled_then_it_counts_for_none_of_the_processes_that_map_it(make_stage):
    before = sample_memory([make_stage(workers=(worker(os.getpid()),))])
    with mmap.mmap(-1, 64 * MIB) as shared:
        shared[:] = bytes(len(shared))
        use = sample_memory([make_stage(workers=(worker(os.getpid()),))])
    assert use.node_rss - before.node_rss < 32 * MIB
    assert use.rss_by_pid[os.getpid()] - before.rss_by_pid[os.getpid()] < 32 * MIB


def test_given_workers_that_are_gone_or_not_yet_reaped_when_sampled_then_the_others_are_told(make_stage):
    with subprocess.Popen(["true"]) as gone, subprocess.Popen(["true"]) as zombie:
        gone.wait()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        use = sample_memory(
            [make_stage(workers=(worker(gone.pid), worker(zombie.pid), worker(os.getpid())))]
        )
    assert use.rss_by_pid.keys() == {zombie.pid, os.getpid()}
    assert (use.rss_by_pid[zombie.pid], use.rss_by_pid[os.getpid()] > 0) == (0, True)


def pretend(proc, pid, kib):
    (proc / str(pid)).mkdir(exist_ok=True)
    text = (
        f"55e1-7ffc ---p 00000000 00:00 0 [rollup]\nRss:  {2 * kib} kB\nPss:  {kib} kB\nPss_Dirty: 1 kB\n"
    )
    (proc / str(pid) / "smaps_rollup").write_text(text)


def test_given_this_process_when_read_then_it_is_what_the_system_says():
    (size,) = ProportionalMemory().sample([os.getpid()], 0.0).values()
    assert 0.8 < size / psutil.Process().memory_full_info().pss < 1.25


def test_given_several_processes_when_sampled_each_second_then_one_is_read_at_a_time_and_each_seldom(
    tmp_path,
):
    for pid in (1, 2, 3):
        pretend(tmp_path, pid, 100 * pid)
    memory = ProportionalMemory(tmp_path)
    assert [len(memory.sample([1, 2, 3], float(second))) for second in range(4)] == [1, 2, 3, 3]
    pretend(tmp_path, 1, 500)
    assert memory.sample([1, 2, 3], 9.0)[1] == 100 << 10
    assert memory.sample([1, 2, 3], 10.0) == {1: 500 << 10, 2: 200 << 10, 3: 300 << 10}


# -- memory that grows


AVAILABLE = psutil.virtual_memory().available / MIB


@pytest.fixture
def stages(make_stage, make_worker):
    def make(*pids, by_workers=()):
        workers = [make_worker(pid, memory_bytes=by_workers) for pid in pids]
        for number, worker in enumerate(workers):
            worker.ready_at_ns, worker.number, worker.tier = 1, number, 0
        return [make_stage("perception", workers=workers)]

    return make


def follow(
    watch, stages, seconds, rss_mib, *, limit_mib=0, by_workers=(), start=0, node_mib=lambda s: 300.0
):
    """Feed one sample a second; returns what was found at the last."""
    found = []
    for second in range(start, start + seconds):
        for worker in stages[0].pool.everyone:
            worker.reported.memory_bytes = {
                key: round(value(second) * MIB) for key, value in dict(by_workers).items()
            }
        summed = {key: round(value(second) * MIB) for key, value in dict(by_workers).items()}
        rss = {pid: round(value(second) * MIB) for pid, value in rss_mib.items()}
        use = MemoryUse(round(node_mib(second) * MIB), rss, summed, 0)
        found = watch.step(use, stages, limit_mib, float(second))
    return found


def test_given_a_worker_that_leaks_when_watched_then_a_warning_says_which_how_fast_and_for_how_long(stages):
    watch = MemoryWatch()
    found = follow(watch, stages(7, 8), 1000, {7: lambda s: 500 + s / 60, 8: lambda s: 500}, limit_mib=4000)
    (finding,) = found
    assert (finding.level, finding.name) == (Level.WARN, "perception: memory grows")
    assert finding.values["series"] == "resident memory of worker 0 (pid 7, tier full)"
    assert [finding.values[key] for key in ("worker", "pid", "tier")] == ["0", "7", "full"]
    assert float(finding.values["memory_growth_mib_per_hour"]) == pytest.approx(60, rel=0.05)
    room_mib = min(4000 - 500 - 500 - 1000 / 60, AVAILABLE)
    assert float(finding.values["memory_exhausted_in_s"]) == pytest.approx(room_mib * 60, rel=0.1)
    assert finding.message.startswith(f"{finding.values['series']} grows by 60.0 MiB/h, as seen over 1")
    assert (
        watch.values("perception")["memory_growth_mib_per_hour"]
        == finding.values["memory_growth_mib_per_hour"]
    )
    assert watch.values("node")["memory_exhausted_in_s"] == "nan"


def test_given_a_leak_that_leaves_minutes_when_watched_then_it_is_an_error_within_minutes(stages):
    (finding,) = follow(MemoryWatch(), stages(7), 200, {7: lambda s: 500 + s}, limit_mib=1000)
    assert finding.level is Level.ERROR
    assert float(finding.values["memory_exhausted_in_s"]) == pytest.approx(300, rel=0.1)


def test_given_a_leaking_worker_when_it_is_replaced_then_its_series_ends_with_it(stages):
    watch, leak = MemoryWatch(), {7: lambda s: 500 + s}
    assert follow(watch, stages(7), 200, leak, limit_mib=1000)
    assert follow(watch, stages(9), 1, {9: lambda s: 500}, limit_mib=1000, start=200) == []
    assert watch.values("perception") == {
        "memory_growth_mib_per_hour": "nan",
        "memory_exhausted_in_s": "nan",
    }


def test_given_a_worker_that_loads_when_watched_then_it_is_no_leak(stages):
    loading = stages(7)
    loading[0].pool.workers[0].ready_at_ns = None
    assert follow(MemoryWatch(), loading, 200, {7: lambda s: 500 + s}, limit_mib=1000) == []


def test_given_the_node_itself_when_it_leaks_then_it_is_told_of_the_node(stages):
    rate = AVAILABLE / 1000  # MiB a second: gone in a quarter of an hour
    (finding,) = follow(MemoryWatch(), stages(), 200, {}, node_mib=lambda s: 300 + rate * s)
    assert finding.name == "node: memory grows"
    assert finding.values["series"] == "resident memory of the node"


def test_given_cuda_memory_when_it_grows_then_the_devices_room_counts(stages):
    by_workers = {"allocated": lambda s: 100 + s, "free": lambda s: 1000 - s}
    by_workers |= {"reserved": lambda s: 5000, "history": lambda s: 1}
    (finding,) = follow(MemoryWatch(), stages(7), 200, {7: lambda s: 500}, by_workers=by_workers)
    assert finding.values["series"] == "CUDA memory in use of worker 0 (pid 7, tier full)"
    assert finding.level is Level.WARN
    assert float(finding.values["memory_exhausted_in_s"]) == pytest.approx(800, rel=0.05)


def test_given_a_leak_too_fast_for_a_trend_when_memory_is_short_then_it_is_known_which_worker_took_it(
    stages,
):
    watch = MemoryWatch()
    found = follow(watch, stages(7, 8), 20, {7: lambda s: 900.0, 8: lambda s: 300.0 + 100 * s})
    assert found == []
    text, values = watch.suspect()
    assert (
        text
        == "the most is perception's resident memory of worker 1 (pid 8, tier full): 1900 MiB more since it"
        " was ready"
    )
    assert values == {
        "stage": "perception",
        "worker": "1",
        "pid": "8",
        "tier": "full",
        "grown_mib": "1900.0",
    }


def test_given_workers_that_took_little_or_the_node_when_memory_is_short_then_none_is_accused(stages):
    watch = MemoryWatch()
    follow(watch, stages(7), 20, {7: lambda s: 900.0 + s / 10}, node_mib=lambda s: 300.0 + 100 * s)
    assert watch.suspect() == ("", {})


def test_given_a_version_beside_the_one_that_serves_when_it_leaks_then_it_is_told_of_that_version(
    stages, make_worker
):
    watch, stage = MemoryWatch(), stages(7)
    beside = make_worker(8, tier=1)
    beside.ready_at_ns = 1
    stage[0].shadow = SimpleNamespace(version="new", pool=SimpleNamespace(everyone=[beside]))
    (finding,) = follow(watch, stage, 200, {7: lambda s: 500.0, 8: lambda s: 500 + s}, limit_mib=2000)
    assert finding.name == "perception/new: memory grows"
    assert finding.values["tier"] == "medium"
    assert watch.suspect()[1]["stage"] == "perception/new"


BASE = 1000.0


def follow_values(series, seconds, noise=2.0, seed=0, every_s=2, room_mib=4000.0):
    """Feed a series with noise; returns the trend and the seconds at which a suspicion was held."""
    trend, rng, held = MemoryTrend(), np.random.default_rng(seed), []
    for second in range(0, seconds, every_s):
        trend.add(float(second), series(second) + rng.normal(0.0, noise))
        if trend.suspicion(room_mib) is not None:
            held.append(second)
    return trend, held


@pytest.mark.parametrize(("mib_per_hour", "within_s"), [(9000, 200), (60, 900)])
def test_given_a_leak_in_noise_when_followed_then_it_is_found_in_time_and_its_rate_is_right(
    mib_per_hour, within_s
):
    trend, held = follow_values(lambda s: BASE + mib_per_hour * s / 3600, within_s + 1000)
    assert held[0] < within_s
    assert held[-100:] == list(range(held[-1] - 198, held[-1] + 1, 2))  # and stays
    assert trend.suspicion(100.0).mib_per_hour == pytest.approx(mib_per_hour, rel=0.1)
    assert trend.suspicion(100.0).confidence > 0.999


@pytest.mark.parametrize("at_once_mib", [1, 20])
@pytest.mark.parametrize("begins_s", [0, 400])
def test_given_a_megabyte_leaked_a_second_when_there_is_room_for_hours_then_it_is_found_within_three_minutes(
    begins_s, at_once_mib
):
    # as all series here
    leak = lambda s: BASE + max(0, s - begins_s) // at_once_mib * at_once_mib  # noqa: E731
    _, held = follow_values(leak, 800, every_s=1, room_mib=32_000.0)
    assert begins_s < held[0] < begins_s + 180
    assert held[-1] == 799


@pytest.mark.parametrize(
    "series",
    [
        pytest.param(lambda s: BASE + 400 * (1 - math.exp(-s / 100)), id="caches that fill for minutes"),
        pytest.param(lambda s: BASE + min(90, max(0, s - 500)), id="growth for a minute and a half"),
        pytest.param(lambda s: BASE + s % 100, id="slow sawtooth"),
        pytest.param(lambda s: BASE, id="noise"),
        pytest.param(lambda s: BASE + 100 * (s > 900) + 200 * (s > 1700), id="two steps"),
        pytest.param(lambda s: BASE + 300 * (1 - math.exp(-s / 15)), id="warm-up, then flat"),
        pytest.param(lambda s: BASE + 50 * (s % 60) / 60, id="sawtooth of a collector"),
        pytest.param(lambda s: BASE - 600 * s / 3600, id="shrinking"),
        pytest.param(lambda s: BASE + 25 * min(s // 20, 3), id="stairs that stop"),
    ],
)
def test_given_memory_that_does_not_grow_for_good_when_followed_then_nothing_is_suspected(series):
    assert follow_values(series, 2700)[1] == []


def test_given_a_staircase_that_goes_on_when_followed_then_it_is_a_leak():
    trend, held = follow_values(lambda s: BASE + 20 * (s // 300), 2400)
    assert held[0] < 1200
    assert trend.suspicion(100.0).mib_per_hour == pytest.approx(240, rel=0.3)


def test_given_a_slow_sawtooth_when_it_comes_back_then_only_its_first_tooth_is_suspected():
    _, held = follow_values(lambda s: BASE + 50 * (s % 1200) / 1200, 5000)
    assert max(held) < 1300


def test_given_growth_that_stops_when_followed_then_the_suspicion_is_over_soon():
    _, held = follow_values(lambda s: BASE + 300 * min(s, 1800) / 1800, 3600)
    assert 600 < held[0] < 900
    assert 1800 <= held[-1] < 2600


def test_given_noise_that_wanders_when_followed_then_it_is_not_taken_for_a_leak():
    rng = np.random.default_rng(3)
    near, far = (wandering(rng, 2700, *how) for how in ((0.9, 9.0), (0.97, 30.0)))
    assert follow_values(lambda s: BASE + near[s], 2700, noise=0.0)[1] == []
    assert (
        len(follow_values(lambda s: BASE + far[s], 1500, noise=0.0, room_mib=300.0)[1]) < 20
    )  # rare where little is left


def wandering(rng, length, correlation, deviation):
    values = [0.0]
    for _ in range(length):
        step = rng.normal(0.0, deviation * math.sqrt(1 - correlation**2))
        values.append(correlation * values[-1] + step)
    return values


def test_given_growth_over_minutes_only_when_there_is_room_then_it_is_believed_later():
    trend = MemoryTrend()
    for second in range(300):
        trend.add(float(second), BASE + second / 4)
    assert trend.growth.mib_per_hour == pytest.approx(900)
    assert trend.suspicion() is None
    assert trend.suspicion(451.0) is None
    assert trend.suspicion(449.0) == trend.growth
    assert trend.growth.lasts_s(15.0) == pytest.approx(60.0, rel=1e-3)
    assert trend.growth.lasts_s(-5.0) == 0.0


def test_given_too_little_to_judge_when_asked_then_nothing_is_known():
    trend = MemoryTrend()
    for second in range(120):
        trend.add(float(second), BASE + second)
    trend.add(121.0, math.nan)
    assert trend.growth is None
    assert trend.suspicion(0.0) is None


def test_given_samples_for_days_when_followed_then_what_is_kept_is_bounded_and_what_shrinks_lasts_for_ever():
    trend, _ = follow_values(lambda s: BASE - s / 1e4, 86_400, every_s=120)
    assert len(pickle.dumps(trend)) < 12_000  # some 270 points of two numbers
    assert 16 * 3600 < trend.growth.window_s < 21 * 3600  # and the longest window is full
    assert trend.growth.lasts_s(1.0) == math.inf


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 1)), min_size=4, max_size=30))
def test_given_any_series_when_its_slope_is_taken_then_it_is_scipys(values):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    times, values = np.arange(len(values), dtype=float) * 3.0, np.array(values)
    assert theil_sen_slope(times, values) == pytest.approx(stats.theilslopes(values, times).slope, abs=1e-9)
