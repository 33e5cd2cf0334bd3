"""A worker's setup, and what a killed process leaves of its workers, with real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import node_config
from torchperf_ros.workers.worker_setup import WorkerFolder, remove_dead_folders, worker_setup


def setup_of(tmp_path, **stage):
    values = {"adapter": "a:B", "output": "path", "tiers": ["full"], **stage}
    node = node_config({"stages": ["planning"], "cache_dir": str(tmp_path / "cache")}, {"planning": values})
    return worker_setup(node.stages[0], node)


def test_given_a_users_package_when_set_up_then_its_folder_is_one_that_packages_are_taken_from(tmp_path):
    package = tmp_path / "mine" / "full.pt2"
    package.parent.mkdir()
    package.touch()
    assert setup_of(tmp_path, packages=[str(package)]).package_dirs == (
        str(tmp_path / "cache"),
        str(package.parent),
    )


def test_given_a_package_that_others_can_write_when_set_up_then_the_parameter_is_named(tmp_path):
    package = tmp_path / "full.pt2"
    package.touch()
    package.chmod(0o666)
    with pytest.raises(
        ConfigError, match=rf"parameter planning.packages: .*others can write {package} .mode 0666"
    ):
        setup_of(tmp_path, packages=[str(package)])


def test_given_a_cache_that_others_can_write_when_set_up_then_it_is_refused_where_packages_are_taken(
    tmp_path,
):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    with pytest.raises(ConfigError, match=rf"parameter cache_dir: .*`chmod 700 {tmp_path}/cache`"):
        setup_of(tmp_path)
    assert setup_of(tmp_path, engine="eager").build[0].engine == "eager"


OWNER = """
from pathlib import Path
from torchperf_ros.workers.worker_setup import WorkerFolder
folder = WorkerFolder()
place = Path(folder.path, "package")
place.mkdir()
(place / "model.so").write_bytes(bytes(100_000))
print(folder.path, flush=True)
input()
"""


@pytest.fixture
def start(tmp_path):
    """Start processes with a worker's folder in `tmp_path`.

    Returns the process and its folder, made long ago.
    """
    processes = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        os.utime(folder, (1, 1))
        return process, folder

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_given_a_killed_process_when_cleared_then_its_folder_is_gone_and_that_of_a_living_one_is_not(
    start, tmp_path
):
    (_, living), (process, dead) = start(), start()
    process.kill()
    process.wait()
    assert 100_000 <= remove_dead_folders(tmp_path) < 200_000
    assert not dead.exists()
    assert (living / "package" / "model.so").exists()


def test_given_a_folder_that_was_just_made_when_cleared_then_it_is_left_to_whoever_makes_it(
    start, tmp_path
):
    process, folder = start()
    process.kill()
    process.wait()
    os.utime(folder)
    assert remove_dead_folders(tmp_path) == 0
    assert folder.exists()


def test_given_what_is_no_folder_of_a_worker_when_cleared_then_it_is_left(tmp_path):
    (tmp_path / "torchperf_worker_file").write_bytes(b"1")
    (tmp_path / "torchperf_other").mkdir()
    (tmp_path / "torchperf_worker_link").symlink_to(tmp_path / "torchperf_other")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    assert remove_dead_folders(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "torchperf_worker_file",
        "torchperf_worker_link",
        "torchperf_other",
    }


def test_given_a_folder_when_removed_then_neither_it_nor_its_descriptor_is_left():
    before = set(os.listdir("/proc/self/fd"))
    folder = WorkerFolder()
    assert set(os.listdir("/proc/self/fd")) > before
    folder.remove()
    assert not Path(folder.path).exists()
    assert set(os.listdir("/proc/self/fd")) <= before
