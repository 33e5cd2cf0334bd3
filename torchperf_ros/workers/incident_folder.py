"""What is kept of incidents.

One folder each, bounded in number and size; and which alerts are worth a profile.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.settings.files import make_private, user_folder

_MIB = 1 << 20
_PART = ".part-"
_ABANDONED_S = 86_400.0
_WRITTEN_WITHIN_S = 60.0
_LONGEST_NAME = 60
_MOST_INCIDENTS = 50  # beside the limit in MiB: a list that a person can look through
_NAME = re.compile(r"\d{8}T\d{6}\.\d{3}Z_.+")


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class IncidentError(TorchperfError):
    """Evidence could not be kept; the message says which, where and why. Nothing half-written is left."""


class IncidentFolder:
    """Incidents as folders `<UTC time>_<what>`, for example `20260301T120000.250Z_profile-perception`.

    An incident is written under another name and gets its own when it is complete, so that whoever finds a
    folder of this form finds all of it. Several processes may write to the same folder.
    """

    def __init__(
        self, root: Path, max_count: int, max_mib: int, utc_now: Callable[[], datetime] = _utc_now
    ) -> None:
        """Take the folder and its bounds; nothing is touched yet.

        The oldest incidents go first. One that is larger than `max_mib` by itself is refused.
        """
        self.root = root  # the folder; made when something is kept
        self._max_count = max_count
        self._max_bytes = max_mib * _MIB
        self._utc_now = utc_now

    def name(self, what: str) -> str:
        """The name of an incident of now, for use before the incident is complete."""
        return f"{self._utc_now():%Y%m%dT%H%M%S.%f}"[:-3] + f"Z_{_as_name(what)}"

    def keep(self, what: str, write: Callable[[Path], None], name: str = "") -> Path:
        """Make a folder for an incident, and remove the oldest ones that no longer fit.

        Returns the new one.

        Takes as long as the disk does: for threads and processes that no frame waits for. The folder that
        `write` puts files into is not there any more under that name afterwards. `name` is what `name` gave
        before, by default one of now.

        Raises:
            IncidentError: the disk is full or not writable, or the incident is larger than everything may
                be.
            Exception: what `write` raises.
        """
        name = name or self.name(what)
        part = self.root / f"{_PART}{os.getpid()}-{time.monotonic_ns()}-{name}"
        try:
            make_private(part)
            write(part)
            size_bytes = folder_size_bytes(part, flush=True)
            if size_bytes > self._max_bytes:
                allowed = f"evidence_mib, {self._max_bytes // _MIB}, allows for all together"
                raise IncidentError(f"evidence {name}: {size_bytes / _MIB:.1f} MiB are more than {allowed}")
            with self._alone():
                kept = self._give_name(part, name)
                self._shrink(kept)
        except OSError as error:
            raise IncidentError(
                f"evidence {name} cannot be kept in {self.root}: {error.strerror or error}; see"
                " evidence_dir"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)  # it is not there any more if all went well
        return kept

    def incidents(self) -> list[Path]:
        """The complete ones, oldest first."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(
            path for path in found if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While this lasts, no other process gives names here or takes incidents away."""
        folder = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _give_name(self, part: Path, name: str) -> Path:
        for number in range(2, self._max_count + 3):
            kept = self.root / name
            try:
                part.rename(kept)
                return kept
            except OSError:
                if not kept.exists():
                    raise
            name = f"{name.partition('.x')[0]}.x{number}"
        raise IncidentError(f"evidence {name} cannot be kept in {self.root}: too many of that name")

    def _shrink(self, kept: Path) -> None:
        """Remove the oldest incidents until the rest fits, but not the new one (a clock may be set back)."""
        others = [path for path in self.incidents() if path != kept]
        sizes = {path: folder_size_bytes(path) for path in (*others, kept)}
        total, count = sum(sizes.values()), len(sizes)
        for path in others:
            if count <= self._max_count and total <= self._max_bytes:
                break
            leaving = self.root / f"{_PART}{path.name}"  # so that no reader finds half of it
            path.rename(leaving)
            shutil.rmtree(leaving, ignore_errors=True)
            total -= sizes[path]
            count -= 1
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left half-written; the folder may be another machine's, too."""
        for path in self.root.glob(f"{_PART}*"):
            with contextlib.suppress(OSError):
                age_s = time.time() - path.stat().st_mtime
                pid = path.name.removeprefix(_PART).partition("-")[0]
                is_gone = pid.isdecimal() and not Path("/proc", pid).exists()
                if age_s > (_WRITTEN_WITHIN_S if is_gone else _ABANDONED_S):
                    shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> tuple[int, int]:
        """Remove every incident, and what was left half-written.

        Returns how many there were, and their bytes.

        Raises:
            OSError: the folder cannot be written.
        """
        removed = size_bytes = 0
        if self.root.is_dir():
            with self._alone():
                for path in self.incidents():
                    size_bytes += folder_size_bytes(path)
                    removed += 1
                    shutil.rmtree(path)
                self._remove_abandoned()
        return removed, size_bytes


@dataclass(frozen=True)
class EvidenceLimits:
    """The parameters of the folder, by their names."""

    evidence_dir: str
    evidence_mib: int


def open_incidents(evidence_dir: str, evidence_mib: int) -> IncidentFolder:
    """The folder that the parameters of this name describe."""
    root = (
        Path(evidence_dir).expanduser() if evidence_dir else user_folder("XDG_STATE_HOME", ".local/state")
    )
    return IncidentFolder(root, _MOST_INCIDENTS, evidence_mib)


def _as_name(what: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", what.lower()).strip("-")[:_LONGEST_NAME] or "incident"


def folder_size_bytes(folder: Path, *, flush: bool = False) -> int:
    """Bytes of all files; with `flush` each is made to reach the disk, as the power may go next."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
            if path.is_file():
                total += path.lstat().st_size
                if flush:
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
    return total


_EVERY_NS, _APART_NS = 600 * NS_PER_S, 60 * NS_PER_S  # between two of a kind of a stage, and of any two


class CaptureRule:
    """Memory that grows asks for a look at it, any other error of a stage for a profile; each seldom."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._asked_ns: dict[tuple[str, str], int] = {}

    def wanted(self, anomaly: Alert, stages: Collection[str], now_ns: int) -> tuple[str, str] | None:
        """The stage and what is wanted of it, `profile` or `memory`.

        None mostly. `taken` says that it could be had.
        """
        stage, _, what = anomaly.name.partition(": ")
        if (
            stage == "node" and stages and stage not in stages
        ):  # a worker's snapshot shows the node's memory, too
            stage = next(iter(stages))
        kind, least = ("memory", Level.WARN) if what == "memory grows" else ("profile", Level.ERROR)
        of_input = what == "bad input" or what.startswith("input ")  # which no profile of a worker explains
        if stage not in stages or of_input or anomaly.level is Level.STALE or anomaly.level < least:
            return None
        # the stages share a machine: one loses a worker for a while, not all of them
        for asked_ns, wait_ns in (
            (self._asked_ns.get((stage, kind)), _EVERY_NS),
            (self._last_ns, _APART_NS),
        ):
            if asked_ns is not None and now_ns - asked_ns < wait_ns:
                return None
        return stage, kind

    def taken(self, stage: str, kind: str, now_ns: int) -> None:
        self._asked_ns[stage, kind] = self._last_ns = now_ns
