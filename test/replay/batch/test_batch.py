"""Many logs on a real cluster of this machine.

Good ones, broken ones, and ones that take their worker with them.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from rich.console import Console
from rich.progress import Progress

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.observe.runs.run_log import read_run
from torchperf_ros.replay.batch.batch import plan_batch, replay_batch
from torchperf_ros.replay.batch.batch_logs import BatchError, find_logs
from torchperf_ros.replay.batch.batch_tasks import BatchOptions, LogTask, open_cluster, replay_one
from torchperf_ros.replay.replay_options import ReplayOptions

from ..conftest import one_stage, write_drive

for _name in ("dask", "distributed", "pyarrow"):
    pytest.importorskip(_name, reason=f"{_name} is not installed")

ROOT = Path(__file__).resolve().parents[3]


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


def wait_until(condition, what, process=None, timeout_s=200.0):
    """Look every 20 ms, for events that nobody notifies of.

    Only while the process lives that brings it about.
    """
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, f"{what}, and its output: {process.communicate()}"
        assert time.monotonic() < give_up_at, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Two good logs, one that is none, one whose worker is lost the first time, and one that loses every worker."""
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
    wait_until(lambda: not workers_alive(replayed.notes), "no worker of a stage is left")
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
        wait_until((drives.notes / "slow").exists, "a frame is replayed")
        shutil.rmtree(run_folder)

    ending = threading.Thread(target=end_the_command)
    ending.start()
    with pytest.raises(TorchperfError, match="the command that started it has ended"):
        replay_one(task)
    ending.join()
    wait_until(lambda: not workers_alive(drives.notes), "no worker of a stage is left")
    assert list(drives.out.iterdir()) == []


def test_given_no_cluster_at_the_address_then_the_error_names_it(drives, monkeypatch):
    monkeypatch.setattr("torchperf_ros.replay.batch.batch_tasks._CONNECT_S", 0.2)
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
        wait_until((drives.notes / "slow").exists, "a frame is replayed, by a process that lives", process)
        if number == signal.SIGINT:  # from a terminal it reaches the whole group
            os.killpg(process.pid, number)
        else:
            process.kill()
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    wait_until(lambda: not workers_alive(drives.notes), "no worker of a stage is left")
    assert "Traceback" not in err
    assert not [path for path in drives.out.iterdir() if not path.name.startswith(".") and path.is_dir()]
    if number == signal.SIGINT:
        assert (process.returncode, out.splitlines()[-1:]) == (
            1,
            [f"0 of 2 logs have results in {drives.out}"],
        )
        assert "interrupted: " in err
        assert [path.name for path in drives.out.glob(".run-*")] == []
