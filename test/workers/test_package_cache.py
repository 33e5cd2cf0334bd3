"""Folders of compiled packages, and of what compilers keep: bounds, locks, and who may write there."""

import contextlib
import fcntl
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.workers.package_cache import (
    VARIABLE,
    NoRoom,
    PackageCache,
    clear_compiler_cache,
    compiler_folder,
    find_package,
    open_cache,
    package_folders,
    unquoted_path,
    use_compiler_cache,
)
from torchperf_ros.workers.package_manifest import Identity, Manifest, PackageError, manifest_path

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
def test_given_any_packages_when_shrunk_then_the_oldest_go_until_the_rest_fits_and_no_more(
    sizes, limit, kept, seed
):
    with tempfile.TemporaryDirectory() as folder:
        cache = PackageCache(Path(folder), limit)
        ages = seed.sample(range(1_000), len(sizes))
        paths = [
            store(cache, size, age, str(n)) for n, (size, age) in enumerate(zip(sizes, ages, strict=True))
        ]
        keep = paths[kept] if kept < len(paths) else None
        cache.shrink(keep)
        left = {entry.path: entry.size_bytes for entry in cache.entries()}
        oldest_first = [
            path for _, path in sorted(zip(ages, paths, strict=True), reverse=True) if path != keep
        ]
        removed = oldest_first[: len(paths) - len(left)]
        assert set(left) == set(paths) - set(removed)
        assert sum(left.values()) <= limit or set(left) <= {keep}
        if removed:
            assert sum(left.values()) + sizes[paths.index(removed[-1])] > limit


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


def test_given_half_written_files_when_shrunk_then_those_that_nobody_writes_go_at_once(tmp_path):
    cache = PackageCache(tmp_path, 1 << 20)
    names = (
        "aa0.1.part.pt2",
        "bb0.2.part.pt2",
        "bb1.2.part.json",
        "cc0.3.part.choice",
        "dd0.4.part.choice",
    )
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))
    with (tmp_path / "package-bb.lock").open("w") as other:  # another process builds
        fcntl.flock(other, fcntl.LOCK_EX)
        cache.shrink()
        assert sorted(path.name for path in tmp_path.glob("*.part.*")) == [names[1], names[2]]
    assert cache.remove_abandoned() == 200
    assert not list(tmp_path.glob("*.part.*"))


def test_given_what_an_interrupted_build_left_when_the_next_one_begins_then_it_is_gone(tmp_path):
    cache, part = PackageCache(tmp_path, 1 << 20), tmp_path / "ff0.1.part.pt2"
    part.touch()
    with cache.building(IDENTITY):
        assert not part.exists()


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


def test_given_a_read_only_folder_when_written_then_the_parameter_is_named_and_reading_works():
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as folder:  # pytest's own lies below one that only its user may enter
        cache = PackageCache(Path(folder), 0)
        path = store(cache, 3_000, 100)
        match = f"parameter cache_dir: {folder} .or TMPDIR. cannot be written: .* Permission denied: .* MiB in {folder}"
        with read_only(cache):
            assert [entry.path for entry in cache.entries()] == [path]
            cache.used(path)
            with pytest.raises(ConfigError, match=match):
                cache.building(IDENTITY).__enter__()
            with pytest.raises(ConfigError, match=match):
                cache.remove(path)
        assert path.exists()


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


def enter(cache, entered):
    with cache.building(IDENTITY):
        entered.set()


def test_given_another_process_that_builds_when_asked_for_the_same_then_it_waits_until_that_one_is_killed(
    tmp_path,
):
    cache, entered = PackageCache(tmp_path / "cache", 0), threading.Event()
    with another_process(cache.folder) as process:
        assert process.stdout.readline() == "in\n"
        cache.remove(cache.path(IDENTITY))
        waiting = threading.Thread(target=enter, args=(cache, entered))
        waiting.start()
        assert not entered.wait(0.3)
        with cache.building(replace(IDENTITY, weights="another")), cache.building(IDENTITY, "choice"):
            pass
        process.kill()
        assert entered.wait(60.0)
        waiting.join()


def test_given_the_parameters_then_folder_and_bound_are_theirs_and_what_was_used_stays(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache("", 64).folder == tmp_path / "torchperf_ros"
    monkeypatch.setenv("HOME", str(tmp_path))
    cache = open_cache("~/mine", 1)
    assert cache.folder == tmp_path / "mine"
    old, young = store(cache, 600 << 10, 9, "a"), store(cache, 600 << 10, 1, "b")
    cache.used(old)
    cache.shrink()
    assert not young.exists()
    assert [entry.path for entry in cache.entries()] == [old]


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "packages" / "next" / "full.pt2"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return path


def test_given_parameters_when_asked_then_packages_are_taken_from_the_cache_and_the_folders_that_they_name(
    tmp_path,
):
    found = package_folders(
        str(tmp_path), ["/opt/next", "~/more"], ["/opt/now/full.pt2", "", "/opt/now/fast.pt2"]
    )
    assert found == [str(tmp_path), "/opt/next", str(Path("~/more").expanduser()), "/opt/now"]


def test_given_a_link_when_looked_for_then_the_file_that_it_leads_to_counts(tmp_path, package):
    link = tmp_path / "link.pt2"
    link.symlink_to(package)
    assert find_package(link, [str(package.parent)]) == package
    with pytest.raises(
        PackageError, match=f"package {package} is in none of the folders .*parameter package_dirs"
    ):
        find_package(link, [str(tmp_path / "pack")])


def test_given_a_package_that_others_can_change_when_looked_for_then_it_is_refused_wherever_it_may_lie(
    package,
):
    package.parent.chmod(0o770)
    for folders in (None, ["/"]):
        with pytest.raises(
            PackageError, match=f"native code: others can write {package.parent} .mode 0770"
        ):
            find_package(package, folders)


def test_given_an_exported_program_when_looked_for_then_it_is_refused(package):
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("program/models/model.json", "{}")
    with pytest.raises(PackageError, match="is an exported program.*have the adapter build the model"):
        find_package(package, None)


def test_given_a_cache_that_others_can_write_when_a_package_is_to_be_built_there_then_it_is_refused(
    tmp_path,
):
    tmp_path.chmod(0o775)
    match = (
        f"parameter cache_dir: packages are not taken from {tmp_path}: others can write {tmp_path} .mode"
        " 0775"
    )
    with pytest.raises(ConfigError, match=match):
        PackageCache(tmp_path, 0).building(IDENTITY).__enter__()


# --- what torch's compilers keep


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    return monkeypatch


@pytest.fixture
def full(tmp_path):
    folder = compiler_folder(str(tmp_path))
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "kernel.so").write_bytes(b"x" * 1000)
    return folder


def test_given_no_cache_when_used_then_cache_and_folder_are_the_users_alone(tmp_path):
    umask = os.umask(0o002)  # as many distributions have it for users with a group of their own
    with use_compiler_cache(str(tmp_path / "cache"), 1 << 20):
        os.umask(umask)
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("cache", "cache/compiler")] == [
            0o700
        ] * 2


@pytest.mark.parametrize("name", ["cache", "cache/compiler"])
def test_given_a_folder_that_others_can_write_when_used_then_it_is_refused(tmp_path, name):
    (tmp_path / "cache" / "compiler").mkdir(parents=True)
    (tmp_path / name).chmod(0o770)
    with pytest.raises(
        ConfigError, match=rf"parameter cache_dir: .*others can write {tmp_path / name} .mode 0770"
    ):
        use_compiler_cache(str(tmp_path / "cache"), 1 << 20)
    assert os.environ[VARIABLE] == ""


def test_given_a_folder_of_the_users_when_used_then_it_is_kept_whatever_its_size(tmp_path, environment):
    own = tmp_path / "own"
    own.mkdir()
    (own / "kernel.so").write_bytes(b"x" * 1000)
    environment.setenv(VARIABLE, str(own))
    with use_compiler_cache(str(tmp_path / "cache"), 10):
        assert os.environ[VARIABLE] == str(own)
    assert (own / "kernel.so").exists()


def test_given_folders_with_a_space_when_used_then_compilers_see_links_without_one(tmp_path, environment):
    temporary = tmp_path / "(my) temporary"
    temporary.mkdir()
    environment.setenv("TMPDIR", str(temporary))
    for _ in range(2):
        environment.setenv(VARIABLE, "")
        with use_compiler_cache(str(tmp_path / "my cache"), 1 << 20):
            chosen = {name: Path(os.environ[name]) for name in (VARIABLE, "TMPDIR")}
        assert {name: path.resolve() for name, path in chosen.items()} == {
            VARIABLE: tmp_path / "my cache" / "compiler",
            "TMPDIR": temporary,
        }
        assert all(re.fullmatch(r"[\w/]+", str(path)) for path in chosen.values())
        assert all(stat.S_IMODE(path.parent.stat().st_mode) == 0o700 for path in chosen.values())
        assert len(set(chosen.values())) == 2
    for path in chosen.values():
        path.unlink()
    assert unquoted_path("/plain/path-1.0") == "/plain/path-1.0"


@pytest.mark.parametrize(("limit_bytes", "kept"), [(1000, True), (999, False)])
def test_given_compiled_code_when_used_then_it_is_emptied_only_beyond_the_limit(
    tmp_path, full, limit_bytes, kept
):
    with use_compiler_cache(str(tmp_path), limit_bytes):
        assert (full / "ab" / "kernel.so").exists() == kept


def test_given_another_process_that_compiles_when_beyond_the_limit_then_nothing_is_removed(tmp_path, full):
    with full.with_name("compiler.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with use_compiler_cache(str(tmp_path), 10):
            assert (full / "ab" / "kernel.so").exists()


def test_given_a_folder_that_cannot_be_made_when_used_then_compilers_have_one_that_is_the_users_alone(
    tmp_path,
):
    (tmp_path / "file").write_text("")
    assert use_compiler_cache(str(tmp_path / "file"), 10) is None
    own = Path(os.environ[VARIABLE])
    assert (stat.S_IMODE(own.stat().st_mode), list(own.iterdir())) == (0o700, [])
    own.rmdir()


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        (
            "CppCompileError: C++ compile error\n\nOutput:\n/tmp/cc.s: Fatal error: 'No space left on device'",
            True,
        ),
        ("g++: fatal error: File size limit exceeded signal terminated program as", True),
        ("[Errno 13] Permission denied: '{folder}/compiler/ab/x.cpp'", True),
        ("[Errno 13] Permission denied: '/opt/weights.pt'", False),
    ],
)
def test_given_an_error_when_a_disk_is_its_reason_then_the_folder_is_named_with_what_is_free(
    tmp_path, text, is_full
):
    cache = PackageCache(tmp_path / "cache", 0)
    with contextlib.nullcontext() if not is_full else pytest.raises(NoRoom) as refused:
        cache.check_room(RuntimeError(text.format(folder=cache.folder)))
    first = (
        f"parameter cache_dir: {cache.folder} .or TMPDIR. cannot be written: .*; free are [0-9,]+ MiB in "
    )
    assert refused is None or re.match(first, str(refused.value))


def test_given_compiled_code_when_cleared_then_it_is_gone_unless_a_process_compiles(
    tmp_path, full, environment
):
    with use_compiler_cache(str(tmp_path), 1 << 20):
        environment.setenv(VARIABLE, "")
        assert clear_compiler_cache(str(tmp_path)) == 0
        assert (full / "ab" / "kernel.so").exists()
    assert clear_compiler_cache(str(tmp_path)) == 1000
    assert not full.exists()
    assert clear_compiler_cache(str(tmp_path)) == 0
