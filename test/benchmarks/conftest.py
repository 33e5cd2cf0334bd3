"""Every benchmark of a file of tests, for a moment; the figures themselves mean nothing here."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--size 64x48 --model-ms 0"
ALONE = "--backup none"  # one worker to wait for
MACHINE = {"cpu", "cores", "kernel", "python", "torch", "rclpy", "load_average", "date"}
WITHIN_S = 240


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """Waits for the end of one of the file's `ARGUMENTS`, each in a ROS graph of its own; gives report and process.

    All begin with the first that is asked for, `AT_ONCE` at a time; where that is one at a time, each when asked for.
    """
    folder, arguments, at_once = tmp_path_factory.mktemp("benchmarks"), request.module.ARGUMENTS, request.module.AT_ONCE

    def run(name):
        domain = {"ROS_DOMAIN_ID": str(1 + (os.getpid() + 13 * list(arguments).index(name)) % 100)}
        words = [*arguments[name].split(), "--json", str(folder / f"{name}.json")]
        return subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *words], cwd=ROOT, env=os.environ | domain, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WITHIN_S, check=False,
        )  # fmt: skip

    pool = ThreadPoolExecutor(at_once)
    running = {name: pool.submit(run, name) for name in arguments} if at_once > 1 else {}

    def end_of(name):
        if name not in running:
            running[name] = pool.submit(run, name)
        return folder / f"{name}.json", running[name].result()

    yield end_of
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def report(finished):
    """Reads the report of a benchmark that ended well."""

    def read(name):
        file, process = finished(name)
        assert process.returncode == 0, process.stdout
        content = json.loads(file.read_text(encoding="utf-8"))
        assert content["benchmark"] == name
        assert content["machine"].keys() >= MACHINE
        assert content["parameters"]
        return content["figures"]

    return read
