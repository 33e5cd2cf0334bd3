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

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.many.many import is_many, plan_many, replay_many
from torchperf_ros.replay.many.many_cluster import default_workers
from torchperf_ros.replay.many.many_logs import KIND, ManyError, check_replaceable, duration_s, find_logs
from torchperf_ros.replay.many.many_options import ManyOptions
from torchperf_ros.replay.many.many_results import finished, options_key, result_key
from torchperf_ros.replay.many.many_summary import write_summary
from torchperf_ros.replay.many.many_task import sharing
from torchperf_ros.replay.replay_config import read_config
from torchperf_ros.replay.replay_options import ReplayOptions

sys.path.insert(0, str(Path(__file__).parent))
import many_case as case

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
    return {log.name: log.path for log in find_logs(paths, results)}


def test_given_a_folder_when_searched_then_logs_of_every_kind_are_found_at_any_depth(tmp_path):
    make(
        tmp_path,
        "a.mcap",
        "deep/deeper/b.db3",
        "deep/c.bag",
        "e.mcap.zstd",
        "split/",
        "notes.txt",
        ".hidden.mcap",
        ".trash/d.bag",
    )
    assert found(tmp_path) == {
        "a": tmp_path / "a.mcap",
        "b": tmp_path / "deep/deeper/b.db3",
        "c": tmp_path / "deep/c.bag",
        "e": tmp_path / "e.mcap.zstd",
        "split": tmp_path / "split",
    }
    (split,) = find_logs([tmp_path / "split"], tmp_path)
    assert [file.name for file in split.files] == ["metadata.yaml", "part_0.mcap", "part_1.mcap"]
    assert split.size_bytes == 15


def test_given_links_and_repeated_paths_when_searched_then_each_log_is_found_once(tmp_path):
    make(tmp_path, "logs/a.mcap")
    (tmp_path / "logs" / "round").symlink_to(tmp_path / "logs")
    (tmp_path / "logs" / "same.mcap").symlink_to(tmp_path / "logs" / "a.mcap")
    (tmp_path / "logs" / "gone.mcap").symlink_to(tmp_path / "nothing.mcap")
    said = []
    logs = find_logs([tmp_path / "logs", tmp_path / "logs" / "a.mcap", tmp_path], tmp_path, said.append)
    assert [log.path for log in logs] == [tmp_path / "logs" / "a.mcap"]
    assert said == [f"log {tmp_path}/logs/gone.mcap: is passed over: a link to nothing"]


def test_given_evidence_when_searched_then_the_incident_is_one_log_with_its_parameters(tmp_path):
    make(tmp_path, "20260301T120000.250Z_late/black_box/", "20260301T120000.250Z_late/parameters.json")
    (log,) = find_logs([tmp_path], tmp_path)
    assert (log.name, log.path) == ("20260301T120000.250Z_late", tmp_path / "20260301T120000.250Z_late")
    assert [file.name for file in log.files] == ["metadata.yaml", "part_0.mcap", "part_1.mcap", "parameters.json"]
    assert not is_many([log.path])


def test_given_a_folder_whose_metadata_is_lost_when_searched_then_numbered_files_are_one_log(tmp_path):
    make(tmp_path, "a/drive_0.mcap", "a/drive_1.mcap", "b/b_0.db3", "c/c_1.mcap", "d/run_0.mcap", "d/other.mcap")
    assert {path.relative_to(tmp_path).as_posix() for path in found(tmp_path).values()} == {
        "a", "b", "c/c_1.mcap", "d/run_0.mcap", "d/other.mcap",
    }  # fmt: skip
    assert not is_many([tmp_path / "a"])
    assert is_many([tmp_path / "d"])


def test_given_results_of_replays_when_searched_then_they_are_no_logs(tmp_path):
    make(tmp_path, "out/monday/run.parquet", "out/monday/output.mcap", "monday.mcap")
    assert list(found(tmp_path)) == ["monday"]


def test_given_logs_of_one_name_when_found_then_each_has_a_name_of_its_own_in_any_order(tmp_path):
    make(tmp_path, "a/drive.mcap", "b/drive.mcap", "b/other.mcap")
    names = found(tmp_path)
    assert len(names) == 3
    assert sorted(name[:8] for name in names) == ["a-drive-", "b-drive-", "other"]
    assert found(tmp_path / "b", tmp_path / "a") == names


def test_given_a_result_of_another_log_of_that_name_when_found_then_the_name_is_not_taken_from_it(tmp_path):
    make(tmp_path, "a/drive.mcap", "b/drive.mcap")
    (tmp_path / "out" / "drive").mkdir(parents=True)
    owner = {"log": {"path": str(tmp_path / "a" / "drive.mcap")}}
    (tmp_path / "out" / "drive" / "summary.json").write_text(json.dumps(owner), encoding="utf-8")
    names = {path: name for name, path in found(tmp_path / "a", tmp_path / "b", results=tmp_path / "out").items()}
    assert names[tmp_path / "a" / "drive.mcap"] == "drive"
    (alone,) = found(tmp_path / "b", results=tmp_path / "out")
    assert alone == names[tmp_path / "b" / "drive.mcap"] != "drive"


def test_given_no_log_when_searched_then_the_error_says_what_one_is(tmp_path):
    make(tmp_path, "notes.txt")
    with pytest.raises(ManyError, match=rf"no log in {tmp_path}: no rosbag2 folder, .mcap, .db3 or ROS 1 .bag file"):
        found(tmp_path)
    with pytest.raises(LogError, match="there.mcap: does not exist"):
        found(tmp_path / "there.mcap")


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads every folder")
@pytest.mark.parametrize("mode", [0o000, 0o400], ids=oct)
def test_given_a_folder_without_permission_when_searched_then_it_is_said_and_the_others_are_searched(tmp_path, mode):
    make(tmp_path, "a.mcap", "locked/b.mcap", "z.mcap")
    (tmp_path / "link.mcap").symlink_to("locked/b.mcap")
    (tmp_path / "locked").chmod(mode)
    code = """if True:
        import sys
        from pathlib import Path
        from torchperf_ros.replay.many.many_logs import find_logs
        folder = Path(sys.argv[1])
        print([log.name for log in find_logs([folder], folder, print)])"""
    unprivileged = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*unprivileged, sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (tmp_path / "locked").chmod(0o700)
    passed_over = f"link {tmp_path}/link.mcap", f"folder {tmp_path}/locked"
    told = [f"{what}: is passed over: Permission denied" for what in passed_over]
    assert (done.stdout.splitlines(), done.stderr) == ([*told, "['a', 'z']"], "")


def test_given_logs_that_say_how_long_they_are_when_asked_then_nothing_else_is_read(tmp_path):
    case.write_log(tmp_path / "bag")
    case.write_log(tmp_path / "file.mcap")
    make(tmp_path, "broken.mcap", "silent.bag")
    lengths = {log.name: duration_s(log) for log in find_logs([tmp_path], tmp_path)}
    assert lengths == {"bag": pytest.approx(0.18), "file": pytest.approx(0.18), "broken": None, "silent": None}


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
        (log,) = find_logs([tmp_path], tmp_path)
        return result_key(log, options_key(ReplayOptions(params=params, **changed), keep_output=False))

    before = key()
    assert key() == before
    assert key(seed=1) != before
    assert key(overrides={"perception.engine": "eager"}) != before
    change(tmp_path / "a.mcap", params)
    assert key() != before


def test_given_a_folder_of_results_when_something_is_missing_then_it_is_not_finished(tmp_path):
    summary = {"key": "k", "files": {"run.parquet": 5}}
    make(tmp_path, "run.parquet")
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert finished(tmp_path, "k") == summary
    assert finished(tmp_path, "other") is None
    (tmp_path / "run.parquet").write_bytes(b"1234")
    assert finished(tmp_path, "k") is None
    assert finished(tmp_path / "nowhere", "k") is None
    (tmp_path / "summary.json").write_text("[]", encoding="utf-8")
    assert finished(tmp_path, "k") is None


@pytest.mark.parametrize(
    ("pace", "cores", "available", "workers"),
    [("fast", 8, 64 * GIB, 8), ("fast", 8, 7 * GIB, 3), ("fast", 8, GIB, 1), ("virtual", 2, 64 * GIB, 2),
     ("real", 8, 64 * GIB, 1)],
)  # fmt: skip
def test_given_a_machine_when_nobody_says_how_many_then_cores_memory_and_pace_do(pace, cores, available, workers):
    assert default_workers(pace, cores, available) == workers


@pytest.mark.parametrize(
    ("values", "words"),
    [({"workers": -1}, "--workers -1: has to be 0 or more"), ({"retries": -1}, "--retries -1"),
     ({"timeout_s": -0.5}, "--timeout -0.5"), ({"scheduler": "10.0.0.5"}, "--scheduler 10.0.0.5: has to be")],
)  # fmt: skip
def test_given_an_option_that_is_not_allowed_when_taken_then_the_error_names_it(tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        ManyOptions(tmp_path, **values)
    make(tmp_path, "file")
    with pytest.raises(ConfigError, match="file: is a file"):
        ManyOptions(tmp_path / "file")


@pytest.mark.parametrize(
    ("told", "beside", "threads"), [(0, 1, 0), (0, 2, 4), (0, 8, 1), (0, 99, 1), (3, 8, 3)], ids=str
)
def test_given_logs_beside_each_other_when_replayed_then_they_share_the_cores(monkeypatch, told, beside, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    options = ReplayOptions(overrides={"worker_threads": told})
    shared = sharing(options, read_config(options), beside)
    assert shared.overrides["worker_threads"] == threads


def test_given_a_fresh_interpreter_when_the_replay_of_many_is_imported_then_dask_is_not_loaded():
    code = "import torchperf_ros.replay.many.many, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "torchperf_ros.replay.many.many_cluster" in loaded
    assert loaded & {"dask", "distributed", "pyarrow", "torch", "rclpy"} == set()


def test_given_no_dask_when_many_logs_are_asked_for_then_the_error_says_what_to_install(monkeypatch, tmp_path):
    make(tmp_path, "a.mcap")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "dask" else find_spec(name))
    console = Console(file=io.StringIO())
    with pytest.raises(ManyError, match=r"several logs need dask, which is not installed: `pip install 'torchperf_ros"):
        replay_many([tmp_path], ReplayOptions(), ManyOptions(tmp_path / "out"), console, console)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ("drives", "drives/wednesday"),  # the log's own folder
        ("drives/wednesday", "lies in the log"),
        ("drives/wednesday/results", "lies in the log"),
        ("out", "out/wednesday, which is no result"),
    ],
)
def test_given_results_that_would_replace_what_is_no_result_when_asked_for_then_nothing_is_touched(
    tmp_path, results, words
):
    make(tmp_path, "drives/wednesday/", "drives/monday.mcap", "out/wednesday/notes.txt")
    before = sorted(tmp_path.rglob("*"))
    console = Console(file=io.StringIO())

    for act in (
        lambda many: list(plan_many([tmp_path / "drives"], ReplayOptions(), many)),
        lambda many: replay_many([tmp_path / "drives"], ReplayOptions(), many, console, console),
    ):
        with pytest.raises(ManyError, match=words):
            act(ManyOptions(tmp_path / results))
    assert sorted(tmp_path.rglob("*")) == before


def test_given_a_result_when_a_log_is_replayed_again_then_it_may_be_replaced_and_other_folders_may_not(tmp_path):
    make(tmp_path, "drives/wednesday.mcap", "out/wednesday/summary.json")
    many = ManyOptions(tmp_path / "out")
    summary = many.folder / "wednesday" / "summary.json"

    summary.write_text(json.dumps({"kind": KIND}), encoding="utf-8")
    assert list(plan_many([tmp_path / "drives"], ReplayOptions(), many))[0].startswith("replay")
    check_replaceable(many.folder / "thursday")  # nothing there
    for other in ("[]", "{}", '{"kind": "bag"}', "no JSON"):
        summary.write_text(other, encoding="utf-8")
        with pytest.raises(ManyError, match="out/wednesday, which is no result of a replay"):
            check_replaceable(many.folder / "wednesday")


@pytest.mark.parametrize(
    ("name", "content"),
    [("report.html", "<html>mine</html>"), ("summary.parquet", "PAR1"), ("summary.json", "{}"),
     ("summary.json", json.dumps({"kind": KIND})), ("report.html/", None)],
    ids=["page", "parquet", "json", "of one log", "folder"],
)  # fmt: skip
def test_given_a_file_of_the_users_where_a_summary_would_be_when_asked_for_then_nothing_is_touched(
    tmp_path, name, content
):
    make(tmp_path, "drives/monday.mcap", f"out/{name}")
    if content:
        (tmp_path / "out" / name).write_text(content, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    console = Console(file=io.StringIO())
    many = ManyOptions(tmp_path / "out")
    for act in (
        lambda: list(plan_many([tmp_path / "drives"], ReplayOptions(), many)),
        lambda: replay_many([tmp_path / "drives"], ReplayOptions(), many, console, console),
    ):
        with pytest.raises(
            ManyError, match=rf"would replace {tmp_path}/out/{name.strip('/')}, which no replay of many"
        ):
            act()
    assert sorted(tmp_path.rglob("*")) == before


def test_given_a_full_disk_when_a_summary_is_written_then_the_error_names_the_file_and_nothing_is_half_there(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / ".summary.json.part").symlink_to("/dev/full")
    with pytest.raises(ManyError, match=rf"^{tmp_path}/summary.json: cannot be written: No space left on device$"):
        write_summary(tmp_path, [], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["foo", "foo:", "a b:1", "http://here:8787", ":99999", ":-1", ":8787/status"])
def test_given_a_dashboard_that_is_no_address_when_asked_for_then_it_is_refused(tmp_path, address):
    with pytest.raises(ConfigError, match="--dashboard .*: has to be HOST:PORT or :PORT, for example :8787"):
        ManyOptions(tmp_path, dashboard=address)


@pytest.mark.parametrize("address", ["", ":8787", "8787", ":0", "localhost:8787", "10.0.0.5:8787", "[::1]:8787"])
def test_given_an_address_of_a_dashboard_when_asked_for_then_it_is_taken(tmp_path, address):
    assert ManyOptions(tmp_path, dashboard=address).dashboard == address
