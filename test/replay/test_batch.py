"""Many logs on a real cluster of this machine.

Good ones, broken ones, and ones that take their worker with them.
"""

import contextlib
import fcntl
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.observe.runs.run_log import read_run
from torchperf_ros.replay.batch import plan_batch, replay_batch
from torchperf_ros.replay.batch_tasks import (
    KIND,
    BatchError,
    BatchOptions,
    LogTask,
    default_parallel,
    find_logs,
    is_batch,
    open_cluster,
    owner_in,
    replay_one,
    result_keys,
    sharing,
)
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.replay_options import ReplayOptions, read_config
from torchperf_ros.tools.main import app

from ..stage.conftest import wait_until
from .conftest import one_stage, write_drive

for _name in ("dask", "distributed", "pyarrow"):
    pytest.importorskip(_name, reason=f"{_name} is not installed")

ROOT = Path(__file__).resolve().parents[2]


class Drives:
    """A folder of logs, its results, and what was said."""

    def __init__(self, folder):
        self.folder, self.logs, self.out, self.notes = (
            folder,
            folder / "logs",
            folder / "out",
            folder / "notes",
        )
        for made in (self.logs, self.notes):
            made.mkdir()
        self.values = one_stage(
            adapter="replay_adapters:Obedient",
            options=json.dumps({"folder": str(self.notes)}),
            tiers=["full"],
        )
        self.options = ReplayOptions(overrides=self.values)

    def replay(self, *paths, **many):
        self.reported = io.StringIO()
        console = Console(file=self.reported, width=200)
        return replay_batch(
            paths or [self.logs],
            self.options,
            BatchOptions(self.out, **{"parallel": 2, **many}),
            Progress(console=console, disable=True),
            console,
        )

    def plan(self, **many):
        return list(plan_batch([self.logs], self.options, BatchOptions(self.out, **many)))

    def summary(self):
        return json.loads((self.out / "summary.json").read_text(encoding="utf-8"))


def workers_alive(folder):
    """Processes of workers that noted themselves and have not ended."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Two good logs, one that is none, one that loses its worker once, and one that loses every worker."""
    import dask

    drives = Drives(tmp_path_factory.mktemp("many"))
    write_drive(drives.logs / "monday")
    write_drive(drives.logs / "tuesday.mcap", frames=20)
    write_drive(drives.logs / "wednesday", "lose once")
    write_drive(drives.logs / "thursday", "lose")
    (drives.logs / "friday.mcap").write_bytes(b"no log")
    with dask.config.set(
        {"distributed.scheduler.allowed-failures": 1}
    ):  # a lost worker takes seconds to come back
        drives.status = drives.replay()
    drives.report = drives.reported.getvalue()
    return drives


def test_given_good_bad_and_lost_logs_when_replayed_then_every_good_one_has_its_result(replayed):
    assert replayed.status == 1
    run = read_run(replayed.out / "tuesday" / "run.parquet")
    assert run.frames["first"]["seq"].tolist() == list(range(20))
    summary = json.loads((replayed.out / "monday" / "summary.json").read_text(encoding="utf-8"))
    assert summary["stages"][0]["answered"] == 10


def test_given_bad_and_lost_logs_when_replayed_then_only_what_may_go_well_is_tried_again(replayed):
    failed = {row["name"]: row["reason"] for row in replayed.summary()["failed"]}
    assert failed.keys() == {"friday", "thursday"}
    assert str(replayed.logs / "friday.mcap") in failed["friday"]
    assert "friday: failed: " in replayed.report
    assert "its worker was lost" in failed["thursday"]
    assert (replayed.notes / "lost").exists(), replayed.report


def test_given_many_logs_when_replayed_then_a_summary_says_what_came_of_each_and_nothing_else_is_left(
    replayed,
):
    frames = {row["name"]: (row["stage"], row["frames"]) for row in replayed.summary()["rows"]}
    assert frames == {"monday": ("first", 10), "tuesday": ("first", 20), "wednesday": ("first", 10)}
    assert "3 of 5 logs have results" in replayed.report
    page = (replayed.out / "report.html").read_text(encoding="utf-8")
    assert 'id="run2"' in page
    assert "<b>friday</b>" in page
    wait_until(lambda: not workers_alive(replayed.notes), lambda: "no worker of a stage is left")
    assert sorted(path.name for path in replayed.out.iterdir()) == [
        ".lock",
        "monday",
        "report.html",
        "summary.json",
        "tuesday",
        "wednesday",
    ]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """Address of a cluster that was there before, and stays."""
    import dask
    from distributed import LocalCluster

    with (
        dask.config.set({"temporary-directory": str(tmp_path_factory.mktemp("dask"))}),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster,
    ):
        yield cluster.scheduler_address


def test_given_results_when_replayed_again_on_a_given_cluster_then_only_what_is_incomplete_is(
    replayed, scheduler
):
    names = ("monday", "tuesday.mcap", "wednesday")
    paths = [replayed.logs / name for name in names]
    assert replayed.replay(*paths) == 0
    assert "3 of 3 logs are done already" in replayed.reported.getvalue()

    run_file = replayed.out / "monday" / "run.parquet"
    run_file.unlink()
    assert replayed.replay(paths[0], paths[2], scheduler=scheduler) == 0
    assert "1 of 2 logs are done already" in replayed.reported.getvalue()
    assert read_run(run_file).frames["first"]["seq"].tolist() == list(range(10))


@pytest.fixture
def drives(tmp_path):
    return Drives(tmp_path)


def test_given_a_task_whose_command_has_ended_when_it_looks_then_it_ends_too_and_leaves_nothing(drives):
    (log,) = find_logs([write_drive(drives.logs / "endless", "slow", frames=5000)])
    run_folder = drives.out / ".run-00000000"
    run_folder.mkdir(parents=True)
    task = LogTask(log, drives.options, drives.out, run_folder, "key")

    def end_the_command():
        wait_until((drives.notes / "slow").exists, lambda: "a frame is replayed")
        shutil.rmtree(run_folder)

    ending = threading.Thread(target=end_the_command)
    ending.start()
    with pytest.raises(TorchperfError, match="the command that started it has ended"):
        replay_one(task)
    ending.join()
    wait_until(lambda: not workers_alive(drives.notes), lambda: "no worker of a stage is left")
    assert list(drives.out.iterdir()) == []


def test_given_no_cluster_at_the_address_then_the_error_names_it(drives, monkeypatch):
    monkeypatch.setattr("torchperf_ros.replay.batch_tasks._CONNECT_S", 0.2)
    with pytest.raises(BatchError, match="^--parallel tcp://127.0.0.1:1: no scheduler answers there"):
        drives.replay(write_drive(drives.logs / "good"), scheduler="tcp://127.0.0.1:1")


def listening_now():
    """Addresses on which this process and those that it has started listen."""
    own, found = psutil.Process(), set()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # another test's, which has ended just now
            found |= {one.laddr for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
    return found


def test_given_a_cluster_of_this_machine_when_open_then_no_page_of_it_is_served_and_no_port_of_others_taken(
    tmp_path,
):
    before = listening_now()
    with open_cluster(BatchOptions(tmp_path, parallel=1), "fast", 1):
        listening = listening_now() - before
        assert {address.ip for address in listening} == {"127.0.0.1"}
        assert 8787 not in {address.port for address in listening}
        for address in listening:
            for page in ("health", "metrics", "info/main/workers.html"):
                with pytest.raises(
                    (OSError, HTTPException)
                ):  # of it are HTTP's 404, and a hang-up where TLS is spoken
                    urlopen(f"http://127.0.0.1:{address.port}/{page}", timeout=10)


def test_given_a_folder_in_use_or_a_bad_parameter_when_replayed_then_it_is_told_before_anything_is_started(
    drives,
):
    write_drive(drives.logs / "good")
    good, drives.options = (
        drives.options,
        ReplayOptions(overrides={**drives.values, "first.budget_ms": -1.0}),
    )
    with pytest.raises(ConfigError, match="budget_ms"):
        drives.replay()
    assert not drives.out.exists()

    drives.options = good
    drives.out.mkdir()
    with open(drives.out / ".lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BatchError, match="another replay writes there now"):
            drives.replay()


def test_given_logs_when_planned_then_each_is_told_with_its_size_and_one_that_changed_is_replayed(replayed):
    *lines, total = replayed.plan()
    assert [(line.split()[0], line.split()[-2]) for line in lines] == [
        ("replay", "friday"),
        ("done", "monday"),
        ("replay", "thursday"),
        ("done", "tuesday"),
        ("done", "wednesday"),
    ]
    assert " 0.0 MiB " in lines[1]
    assert total == "2 of 5 logs to replay, 0.0 MiB in all"
    (replayed.logs / "tuesday.mcap").touch()
    changed = replayed.plan()[3].split()
    assert (changed[0], changed[-2]) == ("replay", "tuesday")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_given_a_replay_of_many_when_ended_then_nothing_of_it_goes_on(drives, tmp_path, number):
    for name in ("first", "second"):
        write_drive(drives.logs / name, "slow", frames=5000)
    sets = [
        word for name, value in drives.values.items() for word in ("--set", f"{name}={json.dumps(value)}")
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torchperf_ros.tools",
            "replay",
            drives.logs,
            "-o",
            drives.out,
            "--parallel",
            "1",
            *sets,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed command leaves its temporary folder behind
    )
    try:
        slow = drives.notes / "slow"
        wait_until(lambda: slow.exists() or process.poll() is not None, lambda: "a frame is replayed")
        assert process.poll() is None, process.communicate()
        if number == signal.SIGINT:  # from a terminal it reaches the whole group
            os.killpg(process.pid, number)
        else:
            process.kill()
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    wait_until(lambda: not workers_alive(drives.notes), lambda: "no worker of a stage is left")
    assert "Traceback" not in err
    assert not [path for path in drives.out.iterdir() if not path.name.startswith(".") and path.is_dir()]
    if number == signal.SIGINT:
        assert (process.returncode, out.splitlines()[-1:]) == (
            1,
            [f"0 of 2 logs have results in {drives.out}"],
        )
        assert "interrupted: " in err
        assert [path.name for path in drives.out.glob(".run-*")] == []


# -- logs that are found, named and planned


GIB = 1 << 30


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
        from torchperf_ros.replay.batch_tasks import find_logs
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


def test_given_a_fresh_interpreter_when_the_replay_of_many_is_imported_then_dask_is_not_loaded(
    python,
):
    code = "import torchperf_ros.replay.batch, sys; print(*sys.modules)"
    loaded = set(python(code).split())
    assert "torchperf_ros.replay.batch_tasks" in loaded
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
