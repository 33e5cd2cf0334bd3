"""Baselines on disk: what is kept, what is refused, and which one fits a run."""

import pytest

from torchperf_ros.observe.runs.compare.baselines import BaselineStore
from torchperf_ros.observe.runs.run_file import write_run
from torchperf_ros.observe.runs.run_log import RunLogError
from torchperf_ros.observe.runs.run_log_source import load_run

from . import compare_runs as made

HERE = made.summary()["machine"]
THERE = {**HERE, "cpu": "Cortex-A1", "fingerprint": "0000000000000000"}


@pytest.fixture
def store(tmp_path):
    return BaselineStore(tmp_path / "baselines")


@pytest.fixture
def write(tmp_path):
    """Write a run of 100 frames and return its path."""

    def write_one(name, seed=1, **changes):
        path = tmp_path / name
        write_run(made.run(made.latencies(100, seed), **changes), path)
        return path

    return write_one


def test_given_a_run_when_saved_then_its_key_is_told_and_the_run_is_the_same(store, write):
    path = write("run.parquet")
    kept = store.save([path], "drive")
    keys = ("commit", "log", "log_sha256", "fingerprint", "cpu", "frames")
    assert [kept.card[key] for key in keys] == [
        "0123456789abcdef",
        "drive.mcap",
        "aa" * 32,
        "feedfeedfeedfeed",
        "Cortex-X9",
        {"perception": 100},
    ]
    assert kept.runs[0].read_bytes() == path.read_bytes()
    assert [one.name for one in store.all()] == [kept.name]
    assert [file.name for file in store.folder.iterdir()] == [kept.name]
    several = store.save([write("b.parquet", seed=2), write("a.json")], "main")
    assert [one.name for one in several.runs] == ["run1.parquet", "run2.json"]


def test_given_a_name_that_is_taken_when_saved_then_it_gives_way_only_if_asked_to(store, write):
    store.save([write("a.json")], "main")
    other = write("b.parquet", seed=2, commit="ffff")
    with pytest.raises(RunLogError, match=r"main is there already.*--replace"):
        store.save([other], "main")
    assert store.get("main").card["commit"] == "0123456789abcdef"
    kept = store.save([other], "main", replace=True)
    assert kept.card["commit"] == "ffff"
    assert sorted(file.name for file in kept.runs[0].parent.iterdir()) == ["baseline.json", "run.parquet"]


@pytest.mark.parametrize("name", ["../main", ".hidden", "-x", "a b", "a/b", "x" * 101, "auto"])
def test_given_a_name_that_is_no_name_when_saved_then_it_is_refused(store, write, name):
    with pytest.raises(RunLogError, match="--save"):
        store.save([write("run.json")], name)
    with pytest.raises(RunLogError, match="was interrupted"):
        store.save([write("cut.json", complete=False)], "main")
    assert not store.folder.exists()


def test_given_several_baselines_then_log_and_machine_decide_then_model_then_parameters(store, write):
    run = load_run(write("new.json", seed=2))
    store.save([write("1.json", params_sha256="dd")], "other_parameters")
    store.save([write("2.json", model={"perception": "dd"})], "another_model")
    assert store.best_for(run).name == "other_parameters"
    store.save([write("3.json")], "older")
    store.save([write("4.json")], "same")
    store.save([write("5.json", model={"perception": "dd"})], "newer_with_another_model")
    store.save([write("6.json", machine=THERE)], "another_machine")
    store.save([write("7.json", log={"path": "other.mcap", "sha256": "11"})], "another_log")
    assert store.best_for(run).name == "same"
    there = load_run(write("there.json", machine=THERE))
    assert store.best_for(there).name == "another_machine"
    elsewhere = load_run(write("else.json", machine={**HERE, "fingerprint": "3333"}))
    with pytest.raises(RunLogError, match=r"another_log \(another log\).*same \(another machine\)"):
        store.best_for(elsewhere)
    assert store.best_for(elsewhere, across_machines=True).name == "another_machine"  # the newest of any


def test_given_a_damaged_baseline_when_listed_then_it_is_named(store, write):
    path = write("run.json")
    store.save([path], "other")
    store.save([path], "main").runs[0].unlink()
    with pytest.raises(RunLogError, match=r"main: is damaged \(no run\); remove this folder"):
        store.all()
    with pytest.raises(RunLogError, match="no baseline 'none' in .*; there are: main, other"):
        store.get("none")


def test_given_no_folder_when_a_store_is_made_then_it_lies_with_the_users_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert BaselineStore().folder == tmp_path / "torchperf_ros" / "baselines"
