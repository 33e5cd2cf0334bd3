"""Where torch's compilers keep what they have compiled: beside the packages, and bounded like them."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from torchperf_ros.core.package_cache import open_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_folder(cache_dir: str) -> Path:
    """The folder, for the parameter `cache_dir`; one that the user has chosen for torch is used as it is."""
    chosen = os.environ.get(VARIABLE, "")
    return Path(chosen) if chosen else open_cache(cache_dir, 0).folder / "compiler"


def use_compiler_cache(cache_dir: str, limit_bytes: int) -> IO[str] | None:
    """Point torch at the folder, and empty it first if it has outgrown its limit and nobody else uses it.

    Before torch is imported. The file that comes back is held open for as long as the process compiles.

    Args:
        cache_dir: the parameter.
        limit_bytes: from this size on it is emptied; torch itself has no bound.

    Returns:
        The lock that is held; None where the folder cannot be written: torch then uses its own.
    """
    folder = compiler_folder(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f"{folder.name}.lock").open("w", encoding="utf-8")
    except OSError:
        return None
    if not os.environ.get(VARIABLE) and _size_bytes(folder) > limit_bytes:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # another process compiles; the next one to start alone empties it
            pass
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.environ[VARIABLE] = str(folder)
    return lock


def clear_compiler_cache(cache_dir: str) -> int:
    """Empty the folder, unless a process compiles just now or the user has chosen it; returns the bytes it freed."""
    folder = compiler_folder(cache_dir)
    if os.environ.get(VARIABLE) or not folder.is_dir():
        return 0
    size_bytes = _size_bytes(folder)
    with folder.with_name(f"{folder.name}.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        shutil.rmtree(folder, ignore_errors=True)
    return size_bytes


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # somebody's temporary file
                continue
    return total
