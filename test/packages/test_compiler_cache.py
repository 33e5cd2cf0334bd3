import fcntl
import os
import stat

import pytest

from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.packages.package_cache import VARIABLE, clear_compiler_cache, compiler_folder, use_compiler_cache


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


@pytest.fixture
def generous_umask():
    """As many distributions have it for users with a group of their own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_given_no_cache_when_used_then_cache_and_folder_are_the_users_alone(tmp_path, generous_umask):
    with use_compiler_cache(str(tmp_path / "cache"), 1 << 20):
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("cache", "cache/compiler")] == [0o700] * 2


@pytest.mark.parametrize("name", ["cache", "cache/compiler"])
def test_given_a_folder_that_others_can_write_when_used_then_it_is_refused(tmp_path, name):
    (tmp_path / "cache" / "compiler").mkdir(parents=True)
    (tmp_path / name).chmod(0o770)
    with pytest.raises(ConfigError, match=rf"parameter cache_dir: .*others can write {tmp_path / name} .mode 0770"):
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


@pytest.mark.parametrize(("limit_bytes", "kept"), [(1000, True), (999, False)])
def test_given_compiled_code_when_used_then_it_is_emptied_only_beyond_the_limit(tmp_path, full, limit_bytes, kept):
    with use_compiler_cache(str(tmp_path), limit_bytes):
        assert (full / "ab" / "kernel.so").exists() == kept


def test_given_another_process_that_compiles_when_beyond_the_limit_then_nothing_is_removed(tmp_path, full):
    with full.with_name("compiler.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with use_compiler_cache(str(tmp_path), 10):
            assert (full / "ab" / "kernel.so").exists()


def test_given_a_folder_that_cannot_be_made_when_used_then_torch_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    assert use_compiler_cache(str(tmp_path / "file"), 10) is None
    assert os.environ[VARIABLE] == ""


def test_given_compiled_code_when_cleared_then_it_is_gone_unless_a_process_compiles(tmp_path, full, environment):
    with use_compiler_cache(str(tmp_path), 1 << 20):
        environment.setenv(VARIABLE, "")
        assert clear_compiler_cache(str(tmp_path)) == 0
        assert (full / "ab" / "kernel.so").exists()
    assert clear_compiler_cache(str(tmp_path)) == 1000
    assert not full.exists()
    assert clear_compiler_cache(str(tmp_path)) == 0
