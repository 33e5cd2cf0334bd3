"""A program that a drive starts and that always ends with it.

And files that are read while they grow.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torchperf_ros
from torchperf_ros.workers.process_setup import die_with_parent

_PATIENCE_S: Final = {signal.SIGINT: 5.0, signal.SIGTERM: 3.0, signal.SIGKILL: 10.0}


class GrowingFile:
    """The lines of a file that another process appends to; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[str]:
        """The whole lines that were added since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line.decode(errors="replace").rstrip("\n")

    def tail(self, count: int) -> str:
        """Its last lines, whether they were read or not."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self._path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
        return ""


class ChildProcess(contextlib.AbstractContextManager["ChildProcess"]):
    """A Python module as a process in its own session, so that the terminal's Ctrl-C is the parent's alone.

    Its `output` and its `errors` are what it wrote to its standard output and to its standard error.
    """

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        """Start `python -m` with these arguments; its output goes to files in the folder."""
        output, errors = folder / f"{name}.out", folder / f"{name}.err"
        self.output, self.errors = GrowingFile(output), GrowingFile(errors)
        path = [str(Path(torchperf_ros.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with output.open("wb") as out, errors.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, and no other thread runs yet
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs, negative if a signal ended it."""
        return self._process.poll()

    def say(self, line: str) -> None:
        """Write a line to its standard input; nothing happens if it is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Send SIGINT, then SIGTERM, then SIGKILL to it and to what it left behind."""
        for number, patience_s in _PATIENCE_S.items():
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def __exit__(self, *_: object) -> None:
        self.end()
