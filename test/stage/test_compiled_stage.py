"""Stages whose tiers are compiled while they serve.

Started in eager, completed beside, taken over worker by worker.
"""

import os
import shutil
import signal
from dataclasses import replace

import psutil
import pytest

from torchperf_ros.api.outcome import Outcome

ENGINE, SUFFIX = (
    "openvino",
    ".blob",
)  # built in seconds, where Inductor takes a minute: `auto` tries that one
pytestmark = [
    pytest.mark.timeout(
        1200
    ),  # a compiler's of lowest priority, on a machine that does other things as well
    pytest.mark.usefixtures("settled_soon"),
]


def engines(stage):
    """Engine of each tier, worker by worker."""
    return [
        [tier.engine for tier in worker.reported.tiers]
        for worker in stage.actor.pool.workers
        if worker is not None
    ]


def ask_until(stage, condition, what, pause_s=0.1):
    """Frame after frame until the condition is true; every one of them has to be answered on time."""

    def good():
        answer = stage.ask()
        assert answer.outcome is Outcome.ON_TIME, (answer.outcome, answer.reason)
        return condition()

    for _ in range(100_000):
        if good():
            return
        stage.news.acquire()
        stage.news.wait(pause_s)
        stage.news.release()
    pytest.fail(what)


def everywhere(stage, *names):
    return lambda: (
        engines(stage) == [list(names)] * stage.actor.config.workers
        and stage.actor.pool.rolling_update.renewal.outcome
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(start_stage, cache, tmp_path_factory):
    """A stage that started without packages, and has been completed while frames came."""
    node = {"cache_dir": str(cache), "package_dirs": [str(tmp_path_factory.getbasetemp())]}
    stage = start_stage(adapter="Compilable", engine=ENGINE, shapes="dynamic", node=node)
    stage.started_with = engines(stage)
    stage.first_pids = stage.pids
    ask_until(stage, everywhere(stage, ENGINE, ENGINE), "every tier compiled")
    return stage


def test_given_no_packages_when_started_then_it_serves_in_eager_and_takes_packages_over_without_a_miss(
    compiled,
):
    assert compiled.started_with[0] == ["eager", "eager"]
    assert not set(compiled.first_pids) & set(compiled.pids)
    assert compiled.actor.pool.restarts == 0
    assert compiled.counters.outcomes[Outcome.ON_TIME] == compiled.counters.answered
    compiled.settle_accounts()
    assert compiled.anomalies == []


def test_given_a_compiled_tier_when_a_frame_comes_then_its_result_is_that_of_the_model(compiled):
    answer = compiled.ask(x=7.0)
    assert compiled.payload(answer).poses[0].pose.position.x == pytest.approx(7.0, rel=1e-4)


def test_given_a_dynamic_package_then_those_declared_are_hits_and_others_are_answered_in_eager(compiled):
    def counted():
        full, _ = compiled.actor.pool.tally.rows(compiled.actor.pool.everyone)
        return full["hits"], full["misses"], full["recompiles"]

    for rows in (2, 3, 17, 64, 65, 1):
        assert compiled.ask({"do": "print", "rows": rows}).outcome is Outcome.ON_TIME
    said = []
    ask_until(compiled, lambda: said.append(counted()) or counted()[1] >= 2, "its counters are told")
    assert counted()[1:] == (2, 0)
    assert counted()[0] >= 4


def test_given_packages_that_fit_when_another_node_starts_then_it_has_them_at_once(
    compiled, start_own_stage, cache
):
    stage = start_own_stage(adapter="Compilable", engine=ENGINE, node={"cache_dir": str(cache)})
    assert engines(stage) == [[ENGINE, ENGINE]] * 2
    assert stage.actor.pool.rolling_update.compiling == ""
    keys = {tier.package for worker in stage.actor.pool.workers for tier in worker.reported.tiers}
    assert keys == {path.stem for path in cache.glob(f"*{SUFFIX}")}


def test_given_a_tier_that_cannot_be_compiled_when_compiled_then_it_stays_in_eager_and_says_why(
    start_own_stage, cache
):
    stage = start_own_stage(
        adapter="HalfCompilable", engine=ENGINE, backup="none", node={"cache_dir": str(cache)}
    )
    ask_until(
        stage,
        lambda: any("is not compiled" in anomaly.message for anomaly in stage.anomalies),
        "it is told",
    )
    (told,) = [anomaly for anomaly in stage.anomalies if "is not compiled" in anomaly.message]
    assert (told.name, "tier full is not compiled" in told.message) == ("tested: model", True)
    ask_until(stage, everywhere(stage, "eager", ENGINE), "the other tier is compiled")


def test_given_engine_auto_when_started_then_it_serves_in_eager_until_a_choice_is_made_and_the_next_start_has_it(
    compiled, start_own_stage, cache
):
    """The choice is between eager and a package that is there already."""
    values = {"adapter": "CompilableByOne", "engine": "auto", "backup": "none", "tiers": ["full"]}
    stage = start_own_stage(**values, node={"cache_dir": str(cache)})
    assert engines(stage) == [["eager"]]

    def chosen():
        workers = [worker for worker in stage.actor.pool.workers if worker is not None]
        return all(tier.choice for worker in workers for tier in worker.reported.tiers)

    ask_until(stage, chosen, "a worker that has what was chosen is there")
    again = start_own_stage(**values, node={"cache_dir": str(cache)})
    assert [tier.choice for tier in again.actor.pool.workers[0].reported.tiers] == [
        tier.choice for tier in stage.actor.pool.workers[0].reported.tiers
    ]
    assert again.actor.pool.rolling_update.compiling == ""


def test_given_a_model_that_compiles_in_part_when_started_then_a_new_worker_has_that_part_compiled(
    start_own_stage, cache
):
    values = {
        "adapter": "CompilableInPart",
        "engine": "compile",
        "parts": "body",
        "backup": "none",
        "tiers": ["full"],
    }
    stage = start_own_stage(**values, shapes="dynamic", node={"cache_dir": str(cache)})
    assert engines(stage) == [["eager"]]
    ask_until(stage, everywhere(stage, "compile"), "a worker that has the part compiled is there")
    for rows in (2, 17, 64):
        assert stage.ask({"do": "print", "rows": rows}).outcome is Outcome.ON_TIME
    assert stage.payload(stage.ask(x=7.0)).poses[0].pose.position.x == pytest.approx(7.0, rel=1e-4)
    (full,) = stage.actor.pool.tally.rows(stage.actor.pool.everyone)
    assert (full["parts"], full["graphs"] > 0, full["recompiles"], full["engine_errors"]) == (
        "body",
        True,
        0,
        0,
    )


def test_given_a_worker_that_dies_while_packages_are_compiled_then_compiling_stands_still_until_it_is_back(
    start_own_stage, tmp_path
):
    stage = start_own_stage(adapter="Compilable", engine=ENGINE, node={"cache_dir": str(tmp_path)})
    builder = stage.actor.pool.rolling_update.builder
    ask_until(stage, lambda: builder.process, "packages are compiled")
    compiler, seen = psutil.Process(builder.process.pid), []
    os.kill(stage.pids[1], signal.SIGKILL)

    def stands_still():
        seen.append(compiler.status())
        return psutil.STATUS_STOPPED in seen

    ask_until(stage, stands_still, "the compile process stands still", pause_s=0.02)
    stage.wait_for_workers()
    ask_until(stage, lambda: compiler.status() != psutil.STATUS_STOPPED, "it goes on")


# -- swapping a package in


@pytest.fixture(scope="module")
def package(compiled, cache, tmp_path_factory):
    """The fast tier's package under another name, with a manifest that has it for the full tier's."""
    key = compiled.actor.pool.workers[0].reported.tiers[1].package
    folder = tmp_path_factory.mktemp("packages")
    for ending in (SUFFIX, ".json"):
        shutil.copy(cache / f"{key}{ending}", folder / f"new{ending}")
    manifest = folder / "new.json"
    manifest.write_text(manifest.read_text().replace('"tier": "fast"', '"tier": "full"'))
    return folder / f"new{SUFFIX}"


def test_given_a_package_that_is_slower_than_the_budget_when_swapped_in_then_it_is_refused(
    compiled, package
):
    pool = compiled.actor.pool
    before = compiled.pids
    pool.config = replace(pool.config, budget_ms=1e-6)
    try:
        pool.rolling_update.swap("full", str(package))
        ask_until(
            compiled, lambda: not pool.rolling_update.swap_state[1].startswith("swapping"), "it is refused"
        )
    finally:
        pool.config = compiled.actor.config
    assert "tier full takes" in pool.rolling_update.swap_state[1]
    assert compiled.pids == before
