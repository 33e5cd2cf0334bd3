import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchperf_ros.analysis.baseline_store import BaselineError, BaselineStore
from torchperf_ros.analysis.regress_run import load_run
from torchperf_ros.cli import app
from torchperf_ros.core.run_file import write_run

sys.path.insert(0, str(Path(__file__).parent))
import regress_runs as made

HERE = made.summary()["machine"]
THERE = {**HERE, "cpu": "Cortex-A1", "fingerprint": "0000000000000000"}


def baseline(*arguments):
    return CliRunner().invoke(app, ["baseline", *map(str, arguments)])


@pytest.fixture
def store(tmp_path):
    return BaselineStore(tmp_path / "baselines")


@pytest.fixture
def write(tmp_path):
    """Write a run of 1,200 frames and return its path."""

    def write_one(name, seed=1, factor=1.0, **changes):
        path = tmp_path / name
        write_run(made.run(made.latencies(1200, seed) * factor, **changes), path)
        return path

    return write_one


def test_given_a_run_when_saved_then_its_key_is_told_and_the_run_is_the_same(store, write):
    path = write("run.parquet")
    kept = store.save(path)

    assert kept.name == "01234567-drive-feedfeed-cccccccc"
    assert (kept.commit, kept.log, kept.log_sha256) == ("0123456789abcdef", "drive.mcap", "aa" * 32)
    assert (kept.fingerprint, kept.cpu, kept.frames) == ("feedfeedfeedfeed", "Cortex-X9", {"perception": 1200})
    assert kept.run.read_bytes() == path.read_bytes()
    assert [one.name for one in store.all()] == [kept.name]
    assert [file.name for file in store.folder.iterdir()] == [kept.name]


def test_given_a_name_that_is_taken_when_saved_then_it_gives_way_only_if_asked_to(store, write):
    store.save(write("a.json"), "main")
    other = write("b.parquet", seed=2, commit="ffff")

    with pytest.raises(BaselineError, match=r"main is there already.*--replace"):
        store.save(other, "main")
    assert store.get("main").commit == "0123456789abcdef"
    kept = store.save(other, "main", replace=True)
    assert kept.commit == "ffff"
    assert sorted(file.name for file in kept.run.parent.iterdir()) == ["baseline.json", "run.parquet"]


@pytest.mark.parametrize("name", ["../main", ".hidden", "-x", "a b", "a/b", "x" * 101])
def test_given_a_name_that_is_no_name_when_saved_then_it_is_refused(store, write, name):
    with pytest.raises(BaselineError, match="--name"):
        store.save(write("run.json"), name)
    assert not store.folder.exists()


def test_given_what_is_no_complete_run_when_saved_then_it_is_refused(store, write, tmp_path):
    with pytest.raises(BaselineError, match="was interrupted"):
        store.save(write("cut.json", complete=False))
    with pytest.raises(BaselineError, match="has to be a .json or .parquet"):
        store.save(tmp_path / "none.json")


def test_given_several_baselines_when_one_is_chosen_then_log_and_machine_decide_then_model_then_parameters(
    store, write
):
    run = load_run(write("new.json", seed=2))
    store.save(write("1.json", params_sha256="dd"), "other_parameters")
    store.save(write("2.json", model={"perception": "dd"}), "another_model")
    assert store.best_for(run).name == "other_parameters"

    store.save(write("3.json"), "older")
    store.save(write("4.json"), "same")
    store.save(write("5.json", model={"perception": "dd"}), "newer_with_another_model")
    store.save(write("6.json", machine=THERE), "another_machine")
    store.save(write("7.json", log={"path": "other.mcap", "sha256": "11"}), "another_log")
    assert store.best_for(run).name == "same"

    there = load_run(write("there.json", machine=THERE))
    assert store.best_for(there).name == "another_machine"
    elsewhere = load_run(write("else.json", machine={**HERE, "fingerprint": "3333"}))
    with pytest.raises(BaselineError, match=r"another_log \(another log\).*same \(another machine\)"):
        store.best_for(elsewhere)
    assert store.best_for(elsewhere, across_machines=True).name == "another_machine"  # the newest of any


def test_given_a_run_that_does_not_name_its_log_when_one_is_chosen_then_none_is(store, write):
    store.save(write("1.json", log=None), "main")
    with pytest.raises(BaselineError, match="--to"):
        store.best_for(load_run(write("new.json", log=None)))


def test_given_a_damaged_baseline_when_read_then_the_message_names_its_folder(store, write):
    kept = store.save(write("run.json"), "main")
    card = kept.run.with_name("baseline.json")
    card.write_text("{}", encoding="utf-8")

    with pytest.raises(BaselineError, match=r"baseline .*main: is damaged"):
        store.all()


def test_given_baselines_when_one_is_deleted_then_it_is_gone_and_the_others_are_not(store, write):
    path = write("run.json")
    for name in ("main", "other"):
        store.save(path, name)
    place = store.get("main").run.parent

    assert store.delete("main", dry_run=True) == place
    assert [one.name for one in store.all()] == ["other", "main"]
    assert store.delete("main") == place
    assert [file.name for file in store.folder.iterdir()] == ["other"]
    assert store.get("other").run.read_bytes() == path.read_bytes()
    for name in ("main", "", ".", "..", "other/../other", str(store.folder / "other")):
        with pytest.raises(BaselineError, match=r"no baseline .*; there are: other$"):
            store.delete(name)


def test_given_a_damaged_baseline_when_it_is_deleted_then_the_others_can_be_listed_again(store, write):
    store.save(write("run.json"), "other")
    store.save(write("run.json"), "main").run.unlink()

    with pytest.raises(BaselineError, match=r"main: is damaged \(no run\); `torchperf baseline delete main` and save"):
        store.all()
    with pytest.raises(BaselineError, match="no baseline 'none' in .*; there are: main, other"):
        store.get("none")
    store.delete("main")
    assert [one.name for one in store.all()] == ["other"]


def test_given_the_delete_command_when_dry_then_it_says_what_and_leaves_it(write, tmp_path):
    folder = ["--dir", tmp_path / "kept"]
    baseline("save", write("main.json"), "--name", "main", *folder)
    place = tmp_path / "kept" / "main"

    dry = baseline("delete", "main", "--dry-run", *folder)
    assert (dry.exit_code, dry.stdout, place.is_dir()) == (0, f"would delete main in {place}\n", True)
    done = baseline("delete", "main", *folder)
    assert (done.exit_code, done.stdout, place.exists()) == (0, f"deleted main in {place}\n", False)
    assert baseline("delete", "main", "--dry-run", *folder).exit_code == 2


def test_given_a_run_without_a_known_latency_when_shown_then_there_are_dashes(tmp_path):
    write_run(made.run([math.nan] * 4), tmp_path / "nan.json")
    baseline("save", tmp_path / "nan.json", "--name", "nan", "--dir", tmp_path / "kept")
    shown = baseline("show", "nan", "--dir", tmp_path / "kept").stdout

    assert shown.splitlines()[-1].split() == ["perception", "4", "-", "-", "-", "-", "100.00%"]


def test_given_the_commands_when_used_in_turn_then_a_slower_run_is_found(write, tmp_path):
    folder = ["--dir", tmp_path / "kept"]
    assert baseline("list", *folder).stdout.strip() == f"no baselines in {tmp_path / 'kept'}"

    saved = baseline("save", write("main.parquet"), "--name", "main", "--commit", "abc123", *folder)
    assert saved.exit_code == 0, saved.output
    assert saved.stdout.startswith("saved main in ")
    listed = baseline("list", *folder).stdout
    assert all(word in listed for word in ("main", "abc123", "drive.mcap", "Cortex-X9", "perception 1,200"))
    shown = baseline("show", "main", *folder).stdout
    assert all(word in shown for word in ("abc123", "Cortex-X9", "feedfeed", "p99 ms", "100.00%", "cccccccccccc"))

    slower = write("slower.json", seed=2, factor=1.3)
    found = baseline("compare", slower, "--json", tmp_path / "v.json", *folder)
    assert found.exit_code == 1, found.output
    assert "baseline: main, saved " in found.stderr
    assert json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["base"]["name"] == "baseline main"
    again = ["compare", write("again.json", seed=3), "--to", "main", *folder]
    assert baseline(*again).exit_code == 0
    assert baseline(*again, "--limit", "p50=19ms").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "none"], "no baseline 'none' in"),
        (["delete", "none"], "no baseline 'none' in"),
        (["save", "none.json"], "run none.json: has to be"),
        (["compare", "none.json"], "log none.json: does not exist"),
        (["compare", "none.json", "--to", "main"], "no baseline 'main' in"),
        (["compare", "none.json", "--skip", "p98"], "--skip 'p98': no such metric"),
    ],
)
def test_given_what_cannot_be_done_when_asked_for_then_one_line_says_so(tmp_path, arguments, words):
    done = baseline(*arguments, "--dir", tmp_path)

    assert done.exit_code == 2
    assert done.output.startswith(f"torchperf: {words}")
    assert len(done.output.splitlines()) == 1


def test_given_a_baseline_of_another_machine_when_compared_by_name_then_it_is_refused_unless_asked_for(write, tmp_path):
    folder = ["--dir", tmp_path / "kept"]
    baseline("save", write("there.json", machine=THERE), "--name", "there", *folder)
    new = write("new.json", seed=2)

    refused = baseline("compare", new, "--to", "there", *folder)
    assert refused.exit_code == 2
    assert "ran on another machine than baseline there" in refused.stderr
    assert baseline("compare", new, "--to", "there", "--across-machines", *folder).exit_code in {0, 1}


def test_given_no_folder_when_a_store_is_made_then_it_lies_with_the_users_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert BaselineStore().folder == tmp_path / "torchperf_ros" / "baselines"
