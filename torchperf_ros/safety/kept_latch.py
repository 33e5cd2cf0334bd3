"""The emergency lane's latch on disk: it outlasts the node, its restart, and the power."""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torchperf_ros.safety.emergency import KINDS, SILENT, Latch
from torchperf_ros.settings.files import (
    node_folder,
    part_of,
    read_bounded,
    remove_file,
    replace_file,
    user_folder,
)

_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 10
_LONGEST_REASON: Final = 10_000  # characters
_AGAIN_S: Final = 1.0
_ENDS_WITHIN_S: Final = 2.0
_TO_CLEAR: Final = "look whether the vehicle may drive, then clear it"


def latch_file(node: str) -> Path:
    """Of a node, by its fully qualified name: /front/perf."""
    return node_folder(user_folder("XDG_STATE_HOME", ".local/state") / "emergency", node) / "latch.json"


def read_latch(path: Path, now_ns: int) -> Latch | None:
    """The latch that a node before this one has left; None: it has left none.

    A file that is damaged, or cannot be read, is a latch: it may have held one.
    """
    try:
        whole = json.loads(read_bounded(path, _MOST_BYTES))
        content = whole["latch"]
        if whole["v"] != _VERSION or whole["sha256"] != _sum(content):
            raise ValueError("another version, or changed since it was written")
        if content["kind"] not in KINDS:
            raise ValueError(f"kind {content['kind']!r} has to be one of {', '.join(KINDS)}")
        since = f"since {content['since']}, before the node's start"
        return Latch(content["kind"], f"{content['reason']} ({since})", now_ns)
    except FileNotFoundError:
        lost = next((one for one in (path, *path.parents) if one.is_symlink() and not one.exists()), None)
        # Only a latch is written, so a part that is left is of one that latched just before its end.
        part = part_of(path)
        if lost is not None:
            why = f"cannot be read ({lost} is a link to what is not there)"
        elif os.path.lexists(part):
            why = f"was being written when that ended, as {part} is there"
        else:
            return None
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"is damaged ({error})"
    return Latch(
        SILENT,
        f"whether it was latched before the node's start is not known: {path} {why}; {_TO_CLEAR}",
        now_ns,
    )


def warning_without_lane(node: str) -> str:
    """What an operator has to know of a node that starts without its emergency lane while that is latched; or ""."""
    path = latch_file(node)
    latch = read_latch(path, 0)
    if latch is None:
        return ""
    return (
        f"the emergency lane of this node is latched: {latch.reason}; as emergency.sensors is empty, nothing holds"
        f" the plans back. Start the node with its sensors and clear the latch, or remove {path}"
    )


def _bytes_of(latch: Latch) -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    content = {"kind": latch.kind, "reason": latch.reason[:_LONGEST_REASON], "since": since}
    return json.dumps({"v": _VERSION, "sha256": _sum(content), "latch": content}).encode()


def _sum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class LatchKeeper:
    """Writes what is latched now, on a thread of its own: a disk may take as long as it likes.

    While it is latched it looks again and again whether the file is there. A node of the same name, as in another
    domain, may have removed it with its own latch, or a person by hand.

    Attributes:
        problem: why the file does not say what holds, empty if it does; it is tried again each second.
    """

    def __init__(
        self, path: Path, latch: Latch | None, begin: Callable[[], None], again_s: float = _AGAIN_S
    ) -> None:
        """The file says that this is latched; `begin` is called on the thread first."""
        self._path, self._begin, self._again_s = path, begin, again_s
        self._wanted = self._tried = self._written = latch
        self._news = threading.Condition()
        self._ending = False
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="latch", daemon=True)
        self._thread.start()

    def keep(self, latch: Latch | None) -> None:
        """Have the file say this; returns at once."""
        if latch is not self._wanted:
            with self._news:
                self._wanted = latch
                self._news.notify()

    def close(self) -> None:
        """Wait until the file says what it has to, but not for long."""
        with self._news:
            self._ending = True
            self._news.notify()
        self._thread.join(_ENDS_WITHIN_S)

    def _run(self) -> None:
        self._begin()
        ending = False
        while not ending:
            with self._news:
                again_s = self._again_s if self.problem or self._tried is not None else None
                self._news.wait_for(lambda: self._ending or self._wanted is not self._tried, again_s)
                wanted, ending = self._wanted, self._ending
            self._tried = wanted
            is_lost = wanted is not None and not os.path.lexists(self._path)
            if self.problem or is_lost or wanted is not self._written:
                self._write(wanted)

    def _write(self, latch: Latch | None) -> None:
        try:
            if latch is None:
                remove_file(self._path)
            else:
                replace_file(self._path, _bytes_of(latch))
        except OSError as error:
            content = "that nothing is latched" if latch is None else f"that it is latched: {latch.reason}"
            self.problem = f"{self._path} does not hold {content}: {error.strerror}; it is tried again"
            if latch is not None:
                with contextlib.suppress(
                    OSError
                ):  # a full disk has room for a name: an empty file is a latch
                    self._path.touch(0o600)
        else:
            self._written, self.problem = latch, ""
