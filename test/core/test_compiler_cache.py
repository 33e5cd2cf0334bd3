import fcntl
import os

import pytest

from torchperf_ros.core.compiler_cache import VARIABLE, clear_compiler_cache, compiler_folder, use_compiler_cache


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


def test_given_a_cache_folder_when_used_then_torch_is_pointed_at_a_folder_in_it(tmp_path):
    with use_compiler_cache(str(tmp_path), 1 << 20):
        assert os.environ[VARIABLE] == str(tmp_path / "compiler")


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
