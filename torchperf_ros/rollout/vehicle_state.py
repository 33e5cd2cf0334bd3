"""What a vehicle remembers of roll-outs, in one file that is whole at any moment at which the power may go."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from torchperf_ros.config.candidate import BASE
from torchperf_ros.config.user_folder import make_private

STATE_FILE: Final = "state.json"
_PART: Final = ".state.json.part"
_VERSION: Final = 1


@dataclass(frozen=True)
class Version:
    """What a stage runs: a name, the parameters that differ from the vehicle's own, sums of its files by path."""

    name: str = BASE
    parameters: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass
class VehicleState:
    """What lasts over a loss of power.

    Attributes:
        serial: of the last plan that was accepted; older ones are replays.
        plan: that plan as it was signed, "" for none, so that a file that is lost or damaged later changes nothing.
        good: versions that served their probation, the last one in service; without any, the base is.
        trial: the version that serves and is not good yet, "" for none.
        cut_off: how often that trial was ended by a loss of power or a kill.
        shadow_s, serving_s: how long each version ran here beside another one, and in service.
        barred: versions that were rolled back here, with the reason.
        lost: when an earlier state was found damaged: what was barred then is not known. The first version that a plan
            brings after it is barred, in doubt.
    """

    serial: int = 0
    plan: str = ""
    good: list[Version] = field(default_factory=list)
    trial: str = ""
    cut_off: int = 0
    shadow_s: dict[str, float] = field(default_factory=dict)
    serving_s: dict[str, float] = field(default_factory=dict)
    barred: dict[str, str] = field(default_factory=dict)
    lost: str = ""

    @property
    def last_good(self) -> Version:
        """The one version that runs after a start."""
        return self.good[-1] if self.good else Version()


def load_state(folder: Path) -> tuple[VehicleState, str]:
    """What the folder holds, and what is wrong with it; "" for nothing.

    A file that is damaged or cannot be read is kept beside, under a name with the time, and the vehicle comes up with
    its base.
    """
    path = folder / STATE_FILE
    try:
        whole = json.loads(path.read_bytes())
        content = whole["state"]
        if whole["v"] != _VERSION or whole["sha256"] != _sum(content):
            raise ValueError("another version, or changed since it was written")
        content["good"] = [Version(**one) for one in content["good"]]
        state = VehicleState(**content)
    except FileNotFoundError:
        return VehicleState(), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        beside = path.with_name(f"state.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json")
        wrong = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is damaged ({error})"
        why = f"state {path}: {wrong}; the vehicle runs its base, and the file is kept as {beside.name}"
        with contextlib.suppress(OSError):
            path.replace(beside)
        return VehicleState(lost=why), why
    return state, ""


def save_state(folder: Path, state: VehicleState) -> None:
    """Replace the file: all of the new state is on the disk on return, and until then all of the old one is.

    Raises:
        OSError: it cannot be written; the old state stays.
    """
    content = asdict(state)
    text = json.dumps({"v": _VERSION, "sha256": _sum(content), "state": content}, allow_nan=False).encode()
    make_private(folder)
    part = folder / _PART
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            while text:
                text = text[os.write(handle, text) :]
            os.fsync(handle)  # before the name: else a file system may write the name first, and nothing under it
        finally:
            os.close(handle)
        os.replace(part, folder / STATE_FILE)
        _sync_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):  # what it takes of a full disk is needed elsewhere
            part.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(content: object) -> str:
    """Finds what a disk has changed, in a number, too."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
