"""Which logs are found, and what they are called."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from torchperf_ros.replay.batch.batch import plan_batch, replay_batch
from torchperf_ros.replay.batch.batch_logs import BatchError, find_logs, is_batch
from torchperf_ros.replay.batch.batch_tasks import (
    KIND,
    BatchOptions,
    default_parallel,
    owner_in,
    result_keys,
    sharing,
)
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.replay_options import ReplayOptions, read_config
from torchperf_ros.tools.main import app

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[3]


def make(folder, *names):
    """Files; a name that ends in `/` is a rosbag2 folder with two files."""
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            for file in ("metadata.yaml", "part_0.mcap", "part_1.mcap"):
                (path / file).write_bytes(b"12345")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"12345")


def found(*paths, results=Path("/nowhere")):
    return {log.name: log.path for log in find_logs(paths, owner_in(results))}


def test_given_a_folder_when_searched_then_logs_of_every_kind_are_found_at_any_depth(tmp_path):
    others = (
        "notes.txt",
        ".hidden.mcap",
        "out/monday/run.parquet",
        "out/monday/output.mcap",
        ".trash/d.bag",
    )  # results
    incident = "20260301T120000.250Z_late"
    make(
        tmp_path,
        "a.mcap",
        "deep/deeper/b.db3",
        "deep/c.bag",
        "e.mcap.zstd",
        "split/",
        f"{incident}/black_box/",
        *others,
    )
    assert found(tmp_path) == {
        incident: tmp_path / incident,
        "a": tmp_path / "a.mcap",
        "b": tmp_path / "deep/deeper/b.db3",
        "c": tmp_path / "deep/c.bag",
        "e": tmp_path / "e.mcap.zstd",
        "split": tmp_path / "split",
    }
    (split,) = find_logs([tmp_path / "split"])
    assert [file.name for file in split.files] == ["metadata.yaml", "part_0.mcap", "part_1.mcap"]
    assert split.size_bytes == 15


def test_given_links_and_repeated_paths_when_searched_then_each_log_is_found_once(tmp_path):
    make(tmp_path, "logs/a.mcap")
    (tmp_path / "logs" / "round").symlink_to(tmp_path / "logs")
    (tmp_path / "logs" / "same.mcap").symlink_to(tmp_path / "logs" / "a.mcap")
    (tmp_path / "logs" / "gone.mcap").symlink_to(tmp_path / "nothing.mcap")
    said = []
    logs = find_logs([tmp_path / "logs", tmp_path / "logs" / "a.mcap", tmp_path], say=said.append)
    assert [log.path for log in logs] == [tmp_path / "logs" / "a.mcap"]
    assert said == [f"log {tmp_path}/logs/gone.mcap: is passed over: a link to nothing"]


def test_given_a_folder_whose_metadata_is_lost_when_searched_then_numbered_files_are_one_log(tmp_path):
    make(
        tmp_path,
        "a/drive_0.mcap",
        "a/drive_1.mcap",
        "b/b_0.db3",
        "c/c_1.mcap",
        "d/run_0.mcap",
        "d/other.mcap",
    )
    assert {path.relative_to(tmp_path).as_posix() for path in found(tmp_path).values()} == {
        "a",
        "b",
        "c/c_1.mcap",
        "d/run_0.mcap",
        "d/other.mcap",
    }
    assert not is_batch([tmp_path / "a"])
    assert is_batch([tmp_path / "d"])


def test_given_logs_of_one_name_when_found_then_each_has_a_name_of_its_own_and_results_keep_theirs(
    tmp_path,
):
    make(tmp_path, "a/drive.mcap", "b/drive.mcap", "b/other.mcap")
    names = found(tmp_path)
    assert len(names) == 3
    assert sorted(name[:8] for name in names) == ["a-drive-", "b-drive-", "other"]
    assert found(tmp_path / "b", tmp_path / "a") == names

    results, other = tmp_path / "out", tmp_path / "b" / "drive.mcap"
    (results / "drive").mkdir(parents=True)
    owner = {"kind": KIND, "log": {"path": str(tmp_path / "a" / "drive.mcap")}}
    (results / "drive" / "summary.json").write_text(json.dumps(owner), encoding="utf-8")
    names = {path: name for name, path in found(tmp_path / "a", tmp_path / "b", results=results).items()}
    assert names[tmp_path / "a" / "drive.mcap"] == "drive"
    assert list(found(other, results=results)) == [names[other]] != ["drive"]


def test_given_no_log_when_searched_then_the_error_says_what_one_is(tmp_path):
    make(tmp_path, "notes.txt")
    with pytest.raises(
        BatchError, match=rf"no log in {tmp_path}: no rosbag2 folder, .mcap, .db3 or ROS 1 .bag file"
    ):
        found(tmp_path)
    with pytest.raises(LogError, match="there.mcap: does not exist"):
        found(tmp_path / "there.mcap")


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads every folder")
def test_given_a_folder_without_permission_when_searched_then_it_is_said_and_the_others_are_searched(
    tmp_path,
):
    make(tmp_path, "a.mcap", "locked/b.mcap", "z.mcap")
    (tmp_path / "link.mcap").symlink_to("locked/b.mcap")
    (tmp_path / "locked").chmod(0o400)
    code = """if True:
        import sys
        from pathlib import Path
        from torchperf_ros.replay.batch.batch_logs import find_logs
        folder = Path(sys.argv[1])
        print([log.name for log in find_logs([folder], say=print)])"""
    unprivileged = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*unprivileged, sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (tmp_path / "locked").chmod(0o700)
    passed_over = f"link {tmp_path}/link.mcap", f"folder {tmp_path}/locked"
    told = [f"{what}: is passed over: Permission denied" for what in passed_over]
    assert (done.stdout.splitlines(), done.stderr) == ([*told, "['a', 'z']"], "")


@pytest.mark.parametrize(
    "change",
    [
        lambda log, params: log.write_bytes(b"123456"),
        lambda log, params: os.utime(log, ns=(0, 0)),
        lambda log, params: params.write_text("perf: {ros__parameters: {stages: []}}", encoding="utf-8"),
    ],
    ids=["size", "time", "parameters"],
)
def test_given_a_result_when_what_it_depends_on_changes_then_its_key_does(tmp_path, change):
    make(tmp_path, "a.mcap")
    params = tmp_path / "params.yaml"
    params.write_text("perf: {}", encoding="utf-8")

    def key(**changed):
        return result_keys(find_logs([tmp_path]), ReplayOptions(params=params, **changed))

    before = key()
    assert key() == before
    assert key(seed=1) != before
    assert key(overrides={"perception.engine": "eager"}) != before
    change(tmp_path / "a.mcap", params)
    assert key() != before


@pytest.mark.parametrize(
    ("pace", "cores", "available", "workers"),
    [
        ("fast", 8, 64 * GIB, 8),
        ("fast", 8, 7 * GIB, 3),
        ("fast", 8, GIB, 1),
        ("virtual", 2, 64 * GIB, 2),
        ("real", 8, 64 * GIB, 1),
    ],
)
def test_given_a_machine_when_nobody_says_how_many_then_cores_memory_and_pace_do(
    pace, cores, available, workers
):
    assert default_parallel(pace, cores, available) == workers


@pytest.mark.parametrize(
    ("told", "beside", "threads"), [(0, 1, 0), (0, 2, 4), (0, 99, 1), (3, 8, 3)], ids=str
)
def test_given_logs_beside_each_other_when_replayed_then_they_share_the_cores(
    monkeypatch, told, beside, threads
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    options = ReplayOptions(overrides={"worker_threads": told})
    shared = sharing(options, read_config(options), beside)
    assert shared.overrides["worker_threads"] == threads


def test_given_a_fresh_interpreter_when_the_replay_of_many_is_imported_then_dask_is_not_loaded():
    code = "import torchperf_ros.replay.batch.batch, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "torchperf_ros.replay.batch.batch_tasks" in loaded
    assert loaded & {"dask", "distributed", "pyarrow", "torch", "rclpy"} == set()


def test_given_no_dask_when_many_logs_are_asked_for_then_the_error_says_what_to_install(
    monkeypatch, tmp_path
):
    make(tmp_path, "logs/a.mcap")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "dask" else find_spec(name)
    )
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "logs"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert done.output == "torchperf: dask is not installed: `pip install 'torchperf_ros[logs]'`\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ("drives", "drives/wednesday, which no replay"),  # the log's own folder
        ("drives/wednesday/results", "lies in the log"),
        ("out", "out/wednesday, which no replay"),
        ("page", "page/report.html, which no replay"),
        ("one", "one/summary.json, which no replay"),  # of one log, not of many
        ("drives/monday.mcap", "is a file"),
    ],
)
def test_given_results_that_would_replace_what_is_none_when_asked_for_then_nothing_is_touched(
    tmp_path, results, words
):
    make(
        tmp_path,
        "drives/wednesday/",
        "drives/monday.mcap",
        "out/wednesday/notes.txt",
        "page/report.html",
        "one/x",
    )
    (tmp_path / "one" / "summary.json").write_text(json.dumps({"kind": KIND}), encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    console = Console(file=io.StringIO())
    batch = BatchOptions(tmp_path / results)
    for act in (
        lambda: list(plan_batch([tmp_path / "drives"], ReplayOptions(), batch)),
        lambda: replay_batch(
            [tmp_path / "drives"], ReplayOptions(), batch, Progress(console=console), console
        ),
    ):
        with pytest.raises(BatchError, match=words):
            act()
    assert sorted(tmp_path.rglob("*")) == before
