"""Folders of compiled packages, keyed by their sources and bounded, and of what torch's compilers keep."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.build_options import PACKAGE_SUFFIXES
from torchperf_ros.settings.files import exposed, make_private, replace_file, user_folder
from torchperf_ros.workers.package_manifest import (
    EngineChoice,
    Identity,
    Manifest,
    PackageError,
    is_exported_program,
    manifest_path,
    read_choice,
    read_manifest,
)

_MIB = 1 << 20
_FORGOTTEN_S = 90 * 86_400.0
_CHOICE = ".choice"
# What is known of capturing a model: why it failed, and that a process has died of it. Files of earlier
# versions have a process's number before the latter suffix; they are no deaths.
_CAPTURE_FAILED, _DEATH = ".uncapturable", ".capturing"
# What the system, compilers and libraries write about a disk that takes no more, and about one of others.
_FULL = (
    *map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *("File size limit exceeded", "file write failed", "Protobuf serialization failed"),
)
_DENIED = tuple(map(os.strerror, (errno.EACCES, errno.EROFS)))
_UNQUOTED = re.compile(r"[\w/.+,:@%=~-]*")

# The environment's name of the folder in which torch's compilers keep what they have compiled.
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class NoRoom(ConfigError):
    """What is compiled cannot be written: no disk space, a quota, a folder that is not to be written."""


@dataclass(frozen=True)
class CachedPackage:
    """One entry: the file, its manifest (None.

    Unreadable, and why), size of both files and when it was last used.
    """

    path: Path
    manifest: Manifest | None
    problem: str
    size_bytes: int
    used_s: float


class PackageCache:
    """Packages as `<key>.pt2` (or see `PACKAGE_SUFFIXES`); a `<key>.json`, written last, completes one."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes

    def check_private(self) -> None:
        """A `ConfigError` where others can write the folder, or one on the way to it.

        Packages are native code.
        """
        if why := exposed(self.folder.resolve()):
            raise ConfigError(f"parameter cache_dir: packages are not taken from {self.folder}: {why}")

    def path(self, identity: Identity) -> Path:
        return (
            self.folder
            / f"{identity.key}{PACKAGE_SUFFIXES.get(identity.options.get('engine', ''), '.pt2')}"
        )

    def choice(self, identity: Identity) -> EngineChoice | None:
        """The choice between engines that was made for this identity, noted as used.

        None where none can be read.
        """
        path = self.folder / f"{identity.key}{_CHOICE}"
        self.used(path)
        return read_choice(path)

    def keep_choice(self, identity: Identity, choice: EngineChoice) -> None:
        replace_file(self.folder / f"{identity.key}{_CHOICE}", choice.to_json().encode())

    def uncapturable(self, of: str = "*") -> dict[str, str]:
        """Keys of models of which no CUDA graph can be captured, and why."""
        return {
            path.stem: path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(self.folder.glob(f"{of}{_CAPTURE_FAILED}"))
        }

    def keep_uncapturable(self, key: str, why: str = "") -> bool:
        """Keep why a model cannot be captured; whether that could be kept.

        Without a reason: its parent, which lives on, has seen a process die while it captured the model. One
        may have been killed by somebody else at just that time, a second one has died of it.
        """
        died = self.folder / f"{key}{_DEATH}"
        why = why or ("2 processes have died while they captured it" if died.exists() else "")
        with contextlib.suppress(OSError):  # a folder of somebody else's
            make_private(self.folder)
            (self.folder / f"{key}{_CAPTURE_FAILED}" if why else died).write_text(why, encoding="utf-8")
            return True
        return False

    def forget_findings(self, of: str = "*") -> None:
        """Remove findings beside the packages: choices between engines, and captures that failed."""
        for path in self._findings(of):
            with contextlib.suppress(OSError):  # somebody else's
                path.unlink()

    def _findings(self, of: str = "*") -> list[Path]:
        return [
            path
            for suffix in (_CHOICE, _CAPTURE_FAILED, _DEATH)
            for path in self.folder.glob(f"{of}{suffix}")
        ]

    def used(self, package: Path) -> None:
        """Note that a package, or a choice, was taken, so that it is removed last."""
        with contextlib.suppress(OSError):  # another user's cache, read-only: its age does not matter
            os.utime(package)

    @contextlib.contextmanager
    def building(self, identity: Identity, what: str = "package") -> Iterator[None]:
        """Context in which no other process builds the same `what`.

        It waits, and finds it done; or a `NoRoom`.
        """
        try:
            make_private(self.folder)
            # one for all keys that begin alike: they are few, and no process removes one that another
            # waits for
            lock = (self.folder / f"{what}-{identity.key[:2]}.lock").open("w", encoding="utf-8")
        except OSError as error:
            raise self._no_room(str(error)) from error
        with lock:
            self.check_private()
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.remove_abandoned()
            yield

    def entries(self) -> list[CachedPackage]:
        """Every package in the folder, the most recently used first."""
        found = []
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        packages = (path for path in files if path.suffix in PACKAGE_SUFFIXES.values())
        for path in (path for path in packages if ".part." not in path.name):
            with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                found.append(_entry(path))
        return sorted(found, key=lambda entry: -entry.used_s)

    def shrink(self, keep: Path | None = None) -> None:
        """Remove the least recently used packages until the rest fits, but not `keep`."""
        entries = self.entries()
        total = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if total <= self._limit_bytes:
                break
            if entry.path != keep:
                self.remove(entry.path)
                total -= entry.size_bytes
        for path in self._findings():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                    path.unlink()
        self.remove_abandoned()

    def remove_abandoned(self) -> int:
        """Remove what interrupted builds left half-written; returns the bytes that this freed.

        The process that writes such a file holds the lock of its key, see `building`.
        """
        freed = 0
        for path in self.folder.glob("*.part.*"):
            of_key = self.folder / f"package-{path.name[:2]}.lock"
            with contextlib.suppress(OSError), of_key.open("w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is held where one writes
                size_bytes = path.stat().st_size
                path.unlink()
                freed += size_bytes
        return freed

    def remove(self, package: Path) -> None:
        """Remove one package, the manifest first, so that no process takes half of it for whole.

        Or raise `NoRoom`.
        """
        try:
            for path in (manifest_path(package), package):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise self._no_room(str(error)) from error

    def check_room(self, error: BaseException) -> None:
        """Raise a `NoRoom` where an error, or a compiler in it, says that a disk cannot be written."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            is_ours = str(self.folder) in line or tempfile.gettempdir() in line
            if any(why in line for why in (*_FULL, *(_DENIED if is_ours else ()))):
                raise self._no_room(line.strip()) from error

    def _no_room(self, why: str) -> NoRoom:
        """The error, with the folders and what is free there."""
        free = ", ".join(
            f"{shutil.disk_usage(next(filter(Path.exists, (folder, *folder.parents)))).free // _MIB:,} MiB"
            f" in {folder}"
            for folder in (self.folder, Path(tempfile.gettempdir()))
        )
        return NoRoom(
            f"parameter cache_dir: {self.folder} (or TMPDIR) cannot be written: {why}; free are {free}: make"
            " room (`torchperf cache --remove all` makes some), or name folders of your own"
        )


def _entry(path: Path) -> CachedPackage:
    size_bytes = path.stat().st_size
    try:
        manifest, problem = read_manifest(path), ""
        size_bytes += manifest_path(path).stat().st_size
    except PackageError as error:
        manifest, problem = None, str(error)
    return CachedPackage(path, manifest, problem, size_bytes, path.stat().st_mtime)


def open_cache(cache_dir: str, cache_mib: int) -> PackageCache:
    """The cache of the parameters of this name, by default `torchperf_ros` in XDG_CACHE_HOME or ~/.cache."""
    folder = Path(cache_dir).expanduser() if cache_dir else user_folder("XDG_CACHE_HOME", ".cache")
    return PackageCache(folder, cache_mib * _MIB)


def package_folders(cache_dir: str, package_dirs: Iterable[str], packages: Iterable[str]) -> list[str]:
    """Where packages may lie that are loaded by their name.

    The parameters' folders, and those of named packages.
    """
    named = [Path(package).parent for package in packages if package]
    folders = [open_cache(cache_dir, 0).folder, *(Path(name).expanduser() for name in package_dirs), *named]
    return list(dict.fromkeys(str(folder.resolve()) for folder in folders))


def find_package(package: Path, folders: Iterable[str] | None) -> Path:
    """The file that a name stands for, with symbolic links followed, if it may be loaded.

    It runs as native code.

    It has to lie in or below one of the `folders` (None: anywhere), where only the user and root can
    put another file in its place.

    Raises:
        PackageError: it is not there, lies elsewhere, or others can change it; or it is an exported
            program.
    """
    try:
        path = package.resolve(strict=True)
    except OSError as error:
        raise PackageError(
            f"package {package} is not there; parameter packages has to name a package, or be empty"
        ) from error
    if folders is not None and not any(path.is_relative_to(folder) for folder in folders):
        raise PackageError(
            f"package {path} is in none of the folders that packages are taken from ({', '.join(folders)});"
            " move it there, or name its folder in the parameter package_dirs"
        )
    if why := exposed(path):
        raise PackageError(f"package {path} is not loaded, as it would run as native code: {why}")
    if is_exported_program(path):
        raise PackageError(
            f"package {path} is an exported program, and loading one runs what its file says: have the"
            " adapter build the model; `torchperf compile -o DIR` makes a package of it"
        )
    return path


def compiler_folder(cache_dir: str) -> Path:
    """The folder, for the parameter `cache_dir`.

    One that the user has chosen for torch is used as it is.
    """
    chosen = os.environ.get(VARIABLE, "")
    return Path(chosen) if chosen else open_cache(cache_dir, 0).folder / "compiler"


def unquoted_path(folder: str | Path) -> str:
    """The folder, or a link to it where its path holds a space or the like.

    Torch gives paths to compilers unquoted.

    The link is the same each time, as torch keeps paths in what it caches, and lies where only the user can
    change it.
    """
    path = os.path.abspath(folder)
    if _UNQUOTED.fullmatch(path):
        return path
    for root in ("/tmp", "/var/tmp", "/dev/shm"):
        own = Path(root, f"torchperf_ros_{os.geteuid()}")
        link = own / hashlib.sha256(path.encode()).hexdigest()[:16]
        with contextlib.suppress(OSError):
            make_private(own)
            if exposed(own):
                continue
            with contextlib.suppress(FileExistsError):
                link.symlink_to(path)
            if os.readlink(link) == path:
                return str(link)
    return path


def compile_in(folder: str | Path) -> None:
    """Have torch's compilers, from now on, keep things in this folder, and find temporary ones usable."""
    os.environ[VARIABLE] = unquoted_path(folder)
    if temporary := os.environ.get("TMPDIR", ""):
        os.environ["TMPDIR"] = unquoted_path(temporary)


def use_compiler_cache(cache_dir: str, limit_bytes: int) -> IO[str] | None:
    """Point torch at the folder, emptied first if it is over its limit and no other process uses it.

    Returns:
        A lock to hold open for as long as the process compiles; None where the folder cannot be written: torch then
        has one for this process. Its own default may be another user's, who would choose what is run.

    Raises:
        ConfigError: others can write it; what lies there is native code.
    """
    folder = compiler_folder(cache_dir)
    if not os.environ.get(VARIABLE) and (why := exposed(folder.resolve())):
        raise ConfigError(f"parameter cache_dir: compiled code is not taken from {folder}: {why}")
    try:
        make_private(folder)
        lock = folder.with_name(f"{folder.name}.lock").open("w", encoding="utf-8")
    except OSError:
        compile_in(tempfile.mkdtemp(prefix="torchperf_"))
        return None
    if not os.environ.get(VARIABLE) and _size_bytes(folder) > limit_bytes:
        _empty(folder, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)
    compile_in(folder)
    return lock


def clear_compiler_cache(cache_dir: str) -> int:
    """Empty the folder, unless a process compiles just now or the user has chosen it.

    Returns the bytes it freed.
    """
    folder = compiler_folder(cache_dir)
    if os.environ.get(VARIABLE) or not folder.is_dir():
        return 0
    size_bytes = _size_bytes(folder)
    with folder.with_name(f"{folder.name}.lock").open("w", encoding="utf-8") as lock:
        _empty(folder, lock)
    return size_bytes - _size_bytes(folder)


def _empty(folder: Path, lock: IO[str]) -> None:
    """Remove what compilers keep; where another process compiles, the next one to start alone does so."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process's temporary file
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
