"""The folder of compiled packages: keyed by what they were built from, bounded in size, safe for many processes."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.package_manifest import Identity, Manifest, PackageError, manifest_path, read_manifest
from torchperf_ros.core.user_folder import user_folder

_MIB = 1 << 20
_ABANDONED_S = 86_400.0


@dataclass(frozen=True)
class CachedPackage:
    """One entry: the file, its manifest (None: unreadable, and why), size of both files and when it was last used."""

    path: Path
    manifest: Manifest | None
    problem: str
    size_bytes: int
    used_s: float


class PackageCache:
    """Packages as `<key>.pt2` and `<key>.json`; a package is complete when its manifest is there, which comes last."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Take the folder, which is made when something is stored.

        Args:
            folder: where the packages lie.
            limit_bytes: from this size on the least recently used ones are removed.
        """
        self.folder = folder
        self._limit_bytes = limit_bytes

    def path(self, identity: Identity) -> Path:
        """Where the package of this identity lies, or would lie."""
        return self.folder / f"{identity.key}.pt2"

    def used(self, package: Path) -> None:
        """Note that a package was loaded, so that it is removed last."""
        with contextlib.suppress(OSError):  # somebody else's cache, read-only: its age does not matter
            os.utime(package)

    @contextlib.contextmanager
    def building(self, identity: Identity) -> Iterator[None]:
        """While this lasts no other process builds the same package; the second one waits, and finds it done.

        Raises:
            ConfigError: the folder cannot be written.
        """
        with self._lock(identity):
            yield

    def _lock(self, identity: Identity) -> TextIO:
        """Wait for the lock; one that was removed meanwhile, with its package, locks nobody out and is made anew."""
        path = self.folder / f"{identity.key}.lock"
        while True:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = path.open("w", encoding="utf-8")
            except OSError as error:
                raise self._not_writable(error) from error
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                    return lock
            lock.close()

    def entries(self) -> list[CachedPackage]:
        """Every package in the folder, the most recently used first."""
        found = []
        packages = self.folder.glob("*.pt2") if self.folder.is_dir() else ()
        for path in (path for path in packages if ".part." not in path.name):
            with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                found.append(_entry(path))
        return sorted(found, key=lambda entry: -entry.used_s)

    def shrink(self, keep: Path | None = None) -> list[Path]:
        """Remove the least recently used packages until the rest fits, but not `keep`; returns what was removed.

        Raises:
            ConfigError: the folder cannot be written.
        """
        entries, removed = self.entries(), []
        total = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if total <= self._limit_bytes:
                break
            if entry.path != keep:
                self.remove(entry.path)
                total -= entry.size_bytes
                removed.append(entry.path)
        self._sweep()
        return removed

    def remove(self, package: Path) -> None:
        """Remove one package; the manifest first, so that nobody takes half of it for whole.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            for path in (manifest_path(package), package):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise self._not_writable(error) from error
        lock_path = package.with_suffix(".lock")
        with contextlib.suppress(OSError), lock_path.open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where one is being built
            lock_path.unlink()

    def clear(self) -> int:
        """Remove every package; returns the bytes that this freed."""
        entries = self.entries()
        for entry in entries:
            self.remove(entry.path)
        return sum(entry.size_bytes for entry in entries)

    def _not_writable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"parameter cache_dir: {self.folder} cannot be written: {error.strerror}; it has to be your own folder"
        )

    def _sweep(self) -> None:
        """Half-written files that a killed process left behind a day ago or earlier."""
        for path in self.folder.glob("*.part.*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def _entry(path: Path) -> CachedPackage:
    size_bytes = path.stat().st_size
    try:
        manifest, problem = read_manifest(path), ""
        size_bytes += manifest_path(path).stat().st_size
    except PackageError as error:
        manifest, problem = None, str(error)
    return CachedPackage(path, manifest, problem, size_bytes, path.stat().st_mtime)


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`torchperf_ros` in XDG_CACHE_HOME, else in `~/.cache`."""
    return user_folder("XDG_CACHE_HOME", ".cache", environment)


def open_cache(cache_dir: str, cache_mib: int) -> PackageCache:
    """The cache that the parameters of this name describe."""
    return PackageCache(Path(cache_dir).expanduser() if cache_dir else default_folder(), cache_mib * _MIB)
