import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.package_cache import PackageCache, default_folder, open_cache
from torchperf_ros.core.package_manifest import Identity, Manifest, manifest_path

IDENTITY = Identity("2.9", "cpu", "AVX2", {"engine": "aoti"}, ["float32 1"], [], "w", "c")


def store(cache, size_bytes, age_s, name="0"):
    """A package whose two files together have this size."""
    cache.folder.mkdir(parents=True, exist_ok=True)
    identity = replace(IDENTITY, weights=name)
    path = cache.path(identity)
    path.touch()
    values = Manifest(identity, "m:C", "full", "", 0, "", {}, {"s": {}}, 0, 0.0, "")
    manifest_path(path).write_text(values.to_json(), encoding="utf-8")
    path.write_bytes(bytes(size_bytes - manifest_path(path).stat().st_size))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def files(cache):
    return sorted(path.name for path in cache.folder.iterdir())


@given(
    sizes=st.lists(st.integers(2_000, 20_000), max_size=6),
    limit=st.integers(0, 60_000),
    kept=st.integers(0, 5),
    seed=st.randoms(use_true_random=False),
)
def test_given_any_packages_when_shrunk_then_the_oldest_go_until_the_rest_fits_and_no_more(sizes, limit, kept, seed):
    with tempfile.TemporaryDirectory() as folder:
        cache = PackageCache(Path(folder), limit)
        ages = seed.sample(range(1_000), len(sizes))
        paths = [store(cache, size, age, str(n)) for n, (size, age) in enumerate(zip(sizes, ages, strict=True))]
        keep = paths[kept] if kept < len(paths) else None
        removed = cache.shrink(keep)
        left = {entry.path: entry.size_bytes for entry in cache.entries()}
        oldest_first = [path for _, path in sorted(zip(ages, paths, strict=True), reverse=True) if path != keep]
        assert removed == oldest_first[: len(removed)]
        assert set(left) == set(paths) - set(removed)
        assert sum(left.values()) <= limit or set(left) <= {keep}
        if removed:
            assert sum(left.values()) + sizes[paths.index(removed[-1])] > limit


def test_given_a_package_that_was_used_when_shrunk_then_it_stays(tmp_path):
    cache = PackageCache(tmp_path, 5_000)
    old, young = store(cache, 3_000, 100, "old"), store(cache, 3_000, 50, "young")
    cache.used(old)
    assert cache.shrink() == [young]
    assert old.exists()


def test_given_damaged_entries_when_listed_then_each_is_there_with_what_is_wrong(tmp_path):
    cache = PackageCache(tmp_path, 0)
    whole, without, damaged = (store(cache, 3_000, age, str(age)) for age in (1, 2, 3))
    manifest_path(without).unlink()
    manifest_path(damaged).write_text("{", encoding="utf-8")
    entries = cache.entries()
    assert [entry.path for entry in entries] == [whole, without, damaged]
    assert [entry.manifest is None for entry in entries] == [False, True, True]
    assert entries[0].size_bytes == 3_000
    assert "has no manifest" in entries[1].problem
    assert "cannot be read" in entries[2].problem


def test_given_half_written_files_when_listed_then_they_are_no_packages(tmp_path):
    cache = PackageCache(tmp_path, 0)
    (tmp_path / "0123.77.part.pt2").touch()
    assert cache.entries() == []


def test_given_half_written_files_when_shrunk_then_only_those_of_a_day_ago_go(tmp_path):
    cache = PackageCache(tmp_path, 1 << 20)
    for name, age_s in (("a.1.part.pt2", 90_000), ("b.2.part.json", 90_000), ("c.3.part.pt2", 3_600)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    cache.shrink()
    assert files(cache) == ["c.3.part.pt2"]


def test_given_a_package_when_removed_then_nothing_of_it_is_left(tmp_path):
    cache = PackageCache(tmp_path, 0)
    path = store(cache, 3_000, 0)
    with cache.building(replace(IDENTITY, weights="0")):
        pass
    cache.remove(path)
    assert files(cache) == []
    cache.remove(path)  # by another process: no error


def test_given_packages_when_cleared_then_none_is_left_and_their_size_is_said(tmp_path):
    cache = PackageCache(tmp_path, 0)
    for name in "abc":
        store(cache, 3_000, 0, name)
    assert cache.clear() == 9_000
    assert cache.entries() == []


def test_given_a_folder_that_is_not_there_when_asked_then_it_is_empty(tmp_path):
    cache = PackageCache(tmp_path / "none", 0)
    assert cache.entries() == []
    assert cache.shrink() == []
    cache.used(cache.path(IDENTITY))
    cache.remove(cache.path(IDENTITY))


@contextlib.contextmanager
def read_only(cache):
    """As somebody who may read the folder only, whoever runs the test."""
    root = os.geteuid() == 0
    cache.folder.chmod(0o555)
    if root:
        os.seteuid(65_534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        cache.folder.chmod(0o755)


WRITES = {
    "build": lambda cache, path: cache.building(IDENTITY).__enter__(),
    "remove": lambda cache, path: cache.remove(path),
    "shrink": lambda cache, path: cache.shrink(),
}


@pytest.mark.parametrize("do", WRITES)
def test_given_a_read_only_folder_when_written_then_the_parameter_is_named_and_reading_works(do):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own lies below one that only its user may enter
        cache = PackageCache(Path(folder), 0)
        path = store(cache, 3_000, 100)
        match = f"parameter cache_dir: {folder} cannot be written: Permission denied; it has to be your own folder"
        with read_only(cache):
            assert [entry.path for entry in cache.entries()] == [path]
            cache.used(path)
            with pytest.raises(ConfigError, match=match):
                WRITES[do](cache, path)
        assert path.exists()


def test_given_a_file_in_place_of_the_folder_when_built_then_the_parameter_is_named(tmp_path):
    (tmp_path / "file").touch()
    cache = PackageCache(tmp_path / "file", 0)
    with pytest.raises(ConfigError, match="parameter cache_dir: .*/file cannot be written"):
        cache.building(IDENTITY).__enter__()


def test_given_a_new_folder_when_built_then_only_its_owner_may_enter(tmp_path):
    cache = PackageCache(tmp_path / "a" / "b", 0)
    with cache.building(IDENTITY):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from test_package_cache import IDENTITY, PackageCache
with PackageCache(Path(sys.argv[1]), 0).building(IDENTITY):
    print("in", flush=True)
    sys.stdin.readline()
    print("out", flush=True)
"""


@contextlib.contextmanager
def another_process(folder):
    command = [sys.executable, "-c", CHILD, str(folder), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def enter(cache, entered, locked):
    with cache.building(IDENTITY):
        locked.append((cache.folder / f"{IDENTITY.key}.lock").exists())  # else the next one would not wait
        entered.set()


@pytest.mark.parametrize("how", ["ends", "is killed"])
@pytest.mark.parametrize("meanwhile", ["nothing", "removed", "folder gone"])
def test_given_another_process_that_builds_when_asked_for_the_same_then_it_waits_until_that_one_is_done(
    tmp_path, how, meanwhile
):
    cache, entered = PackageCache(tmp_path / "cache", 0), threading.Event()
    locked = []
    with another_process(cache.folder) as process:
        assert process.stdout.readline() == "in\n"
        if meanwhile == "removed":
            cache.remove(cache.path(IDENTITY))
        waiting = threading.Thread(target=enter, args=(cache, entered, locked))
        waiting.start()
        assert not entered.wait(0.3)
        with cache.building(replace(IDENTITY, weights="another")):
            pass
        if meanwhile == "folder gone":
            for path in cache.folder.iterdir():
                path.unlink()
            cache.folder.rmdir()
        if how == "ends":
            process.stdin.write("\n")
            process.stdin.flush()
        else:
            process.kill()
        assert entered.wait(20.0)
        waiting.join()
        assert locked == [True]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x/cache", "HOME": "/home/me"}, "/x/cache"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache"),
        ({"HOME": "/home/me"}, "/home/me/.cache"),
    ],
)
def test_given_an_environment_when_asked_then_the_folder_is_where_the_specification_says(environment, folder):
    assert default_folder(environment) == Path(folder) / "torchperf_ros"


@pytest.mark.parametrize("home", ["/home/listed", None])
def test_given_no_home_in_the_environment_when_asked_then_it_is_the_users_and_never_one_that_everybody_may_write_to(
    monkeypatch, home
):
    def listed(uid):
        if home is None:
            raise KeyError(uid)
        return type("Entry", (), {"pw_dir": home})

    monkeypatch.setattr("pwd.getpwuid", listed)
    assert default_folder({}) == Path(home or "/") / ".cache" / "torchperf_ros"


def test_given_the_parameters_when_opened_then_folder_and_bound_are_theirs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache("", 64).folder == tmp_path / "torchperf_ros"
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = open_cache("~/mine", 1)
    assert cache.folder == tmp_path / "mine"
    old, young = store(cache, 600 << 10, 9, "a"), store(cache, 600 << 10, 1, "b")
    assert cache.shrink() == [old]
    assert young.exists()
