"""Every benchmark for a moment; the figures themselves mean nothing here."""

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from ..ros_domain import own_domain

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--size 64x48 --model-ms 0"
ALONE = "--backup none"  # one worker to wait for
MACHINE = {"cpu", "cores", "kernel", "python", "torch", "rclpy", "load_average", "date"}
WITHIN_S = 800
AT_ONCE = 4  # much of their time is waiting for workers


def figures_of(name, file):
    """What is in the report of a benchmark, which says what it was measured on as well."""
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["benchmark"] == name
    assert content["machine"].keys() >= MACHINE
    assert content["parameters"]
    return content["figures"]


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Runs a benchmark in this process, which has imported what it needs, and gives its figures."""
    threads = torch.get_num_threads()

    def run(name, arguments):
        file = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [name, *arguments.split(), "--json", str(file)])
        assert importlib.import_module(f"benchmarks.{name}").main() == 0
        return figures_of(name, file)

    with mock.patch.dict(os.environ, {"ROS_DOMAIN_ID": str(own_domain())}):
        yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """Waits for the end of one of the file's `ARGUMENTS`, each in a process and a ROS graph of its own.

    Gives its report and its process. All begin with the first that is asked for, `AT_ONCE` at a time.
    """
    folder, arguments = tmp_path_factory.mktemp("benchmarks"), request.module.ARGUMENTS

    def run(name):
        domain = {"ROS_DOMAIN_ID": str(own_domain(name))}
        words = [*arguments[name].split(), "--json", str(folder / f"{name}.json")]
        return subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *words],
            cwd=ROOT,
            env=os.environ | domain,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=WITHIN_S,
            check=False,
        )

    pool = ThreadPoolExecutor(AT_ONCE)
    running = {name: pool.submit(run, name) for name in arguments}
    yield lambda name: (folder / f"{name}.json", running[name].result())
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def report(finished):
    """Reads the report of a benchmark that ended well."""

    def read(name):
        file, process = finished(name)
        assert process.returncode == 0, process.stdout
        return figures_of(name, file)

    return read
