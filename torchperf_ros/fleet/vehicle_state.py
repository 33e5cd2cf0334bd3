"""What a vehicle remembers of roll-outs, in one file that is whole whenever the power may go."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.settings.config import BASE
from torchperf_ros.settings.files import make_private, read_bounded, replace_file

STATE_FILE: Final = "state.json"
_VERSION: Final = 1
# Of the file: a plan of 1 MiB at most, and what is left of earlier ones.
_MOST_BYTES: Final = 16 << 20


class RolloutStateError(TorchperfError):
    """The vehicle cannot remember what it is about to do, so it must not do it.

    The message says why and what to do.
    """


@dataclass(frozen=True)
class Version:
    """What a stage runs.

    A name, the parameters that differ from the vehicle's own, sums of its files by path.
    """

    name: str = BASE
    parameters: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass
class VehicleState:
    """What lasts over a loss of power.

    Attributes:
        serial: of the last plan that was accepted; older ones are replays.
        plan: that plan as it was signed, "" for none, so that a file that is lost or damaged later changes
            nothing.
        good: versions that served their probation, the last one in service; without any, the base is.
        trial: the version that serves and is not good yet, "" for none.
        cut_off: how often that trial was ended by a loss of power or a kill.
        counted: whether the last such end is among them, and the version has not run since. A start that
            comes to nothing, as a camera is not there yet, is no end of a trial.
        shadow_s, serving_s: how long each version ran here beside another one, and in service.
        barred: versions that were rolled back here, with the reason.
        lost: when an earlier state was found damaged: what was barred then is not known. The first version
            that a plan brings after it is barred, in doubt.
    """

    serial: int = 0
    plan: str = ""
    good: list[Version] = field(default_factory=list)
    trial: str = ""
    cut_off: int = 0
    counted: bool = False
    shadow_s: dict[str, float] = field(default_factory=dict)
    serving_s: dict[str, float] = field(default_factory=dict)
    barred: dict[str, str] = field(default_factory=dict)
    lost: str = ""

    @property
    def last_good(self) -> Version:
        return self.good[-1] if self.good else Version()


def load_state(folder: Path) -> tuple[VehicleState, str]:
    """What the folder holds, and what is wrong with it; "" for nothing.

    A file that is damaged or cannot be read is kept beside, under a name with the time, and the vehicle
    comes up with its base.
    """
    path = folder / STATE_FILE
    try:
        whole = json.loads(read_bounded(path, _MOST_BYTES))
        content = whole["state"]
        if whole["v"] != _VERSION or whole["sha256"] != _sum(content):
            raise ValueError("another version, or changed since it was written")
        content["good"] = [Version(**one) for one in content["good"]]
        state = VehicleState(**content)
    except FileNotFoundError:
        return VehicleState(), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        beside = path.with_name(f"state.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json")
        wrong = (
            f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is damaged ({error})"
        )
        why = f"state {path}: {wrong}; the vehicle runs its base, and the file is kept as {beside.name}"
        with contextlib.suppress(OSError):
            path.replace(beside)
        return VehicleState(lost=why), why
    return state, ""


class FolderLock:
    """A folder whose state one node reads and replaces.

    No other node may meanwhile. The lock holds until the object goes.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder where it is missing, and take it.

        Raises:
            RolloutStateError: another one has it.
            OSError: it cannot be made, as the disk is full or read-only.
        """
        make_private(folder)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.release = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise RolloutStateError(
                f"state {folder}: another node uses it, and each would forget what the other one has"
                " written; give each node a name or namespace of its own, or another XDG_STATE_HOME"
            ) from error


_LOCKS: Final = weakref.WeakValueDictionary[tuple[str, str], FolderLock]()


def lock_folder(folder: Path, plan: Path) -> FolderLock:
    """The lock of the folder for whoever follows this plan.

    A process that has it for this plan already gets the same one: it is the same node, which is configured
    again.

    Raises:
        RolloutStateError, OSError: see `FolderLock`.
    """
    key = os.path.realpath(folder), os.path.realpath(plan)
    if (lock := _LOCKS.get(key)) is None:
        lock = _LOCKS[key] = FolderLock(folder)
    return lock


def save_state(folder: Path, state: VehicleState) -> None:
    """Replace the file.

    All of the new state is on the disk on return, and until then all of the old one is.

    Raises:
        OSError: it cannot be written; the old state stays.
    """
    content = asdict(state)
    text = json.dumps({"v": _VERSION, "sha256": _sum(content), "state": content}, allow_nan=False).encode()
    replace_file(folder / STATE_FILE, text)


def _sum(content: object) -> str:
    """Finds what a disk has changed, in a number, too."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
