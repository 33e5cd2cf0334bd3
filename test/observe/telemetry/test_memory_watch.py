from types import SimpleNamespace

import psutil
import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.observe.telemetry.memory import MemoryUse
from torchperf_ros.observe.watch.memory_watch import MemoryWatch

MIB = 1 << 20
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
