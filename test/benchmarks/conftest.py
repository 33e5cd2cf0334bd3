"""Every benchmark of a file of tests, for a moment; the figures themselves mean nothing here."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--size", "64x48", "--model-ms", "0"]
ALONE = ["--backup", "none"]  # one worker to wait for
MACHINE = {"cpu", "cores", "kernel", "python", "torch", "rclpy", "load_average", "date"}
WITHIN_S = 240


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """The file's `ARGUMENTS`, `AT_ONCE` at a time, each in a ROS graph of its own."""
    folder, arguments = tmp_path_factory.mktemp("benchmarks"), request.module.ARGUMENTS

    def run(number, name):
        domain = {"ROS_DOMAIN_ID": str(1 + (os.getpid() + 13 * number) % 100)}
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments[name], "--json", str(folder / f"{name}.json")]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | domain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=WITHIN_S, check=False,
        )  # fmt: skip

    with ThreadPoolExecutor(request.module.AT_ONCE) as pool:
        done = dict(zip(arguments, pool.map(run, range(len(arguments)), arguments), strict=True))
    return folder, {name: one.stdout for name, one in done.items()}, {n: one.returncode for n, one in done.items()}


@pytest.fixture
def report(finished):
    """Reads the report of a benchmark that ended well."""
    folder, said, status = finished

    def read(name):
        assert status[name] == 0, said[name]
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert content["benchmark"] == name
        assert content["machine"].keys() >= MACHINE
        assert content["parameters"]
        return content["figures"]

    return read
