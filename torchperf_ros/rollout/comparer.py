"""Whether two versions' outputs are the same, by the rules of golden comparison, in a process of its own.

Comparing takes the interpreter for milliseconds, which no thread of the node may do. One pair at a time is out; what
comes meanwhile is not compared, and counted.
"""

import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torchperf_ros.replay.golden.message_rule import Rules

_HEAD: Final = struct.Struct("<QII")  # seq, lengths of the two outputs
_PIPE_BYTES: Final = 1 << 20  # a pair that fits never holds up who sends it
_AGAIN_S: Final = 5.0  # after the process has ended
_ENTRY: Final = (  # a child of a real-time node is real-time, before it has imported anything, too
    "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "
    "from torchperf_ros.rollout.comparer import main; main()"
)
_NICE: Final = 19


class Compared(NamedTuple):
    """What came of a pair: `difference` names the first field that differs, "" if none does."""

    seq: int
    difference: str


class OutputComparer:
    """The node's side; one thread calls.

    Attributes:
        left_out: pairs that were not compared: another one was, they are too large, or the process had ended.
        problem: why it does not compare now, "" if it does.
    """

    def __init__(self, output_type: str, tolerance: float) -> None:
        """Compare messages of this type, for example `nav_msgs/msg/Path`; the process starts with the first pair.

        `tolerance`: floating-point numbers are the same that are so near each other, in their unit.
        """
        self.left_out, self.problem = 0, ""
        self._arguments = [output_type, repr(tolerance)]
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = False
        self._not_before_s = 0.0
        self._said = b""

    def offer(self, seq: int, served: bytes, other: bytes) -> bool:
        """Have a pair compared; False if it is left out."""
        if self._busy or _HEAD.size + len(served) + len(other) > _PIPE_BYTES or not self._start():
            self.left_out += 1
            return False
        assert self._process is not None
        try:
            _pipe(self._process.stdin).write(_HEAD.pack(seq, len(served), len(other)) + served + other)
        except OSError:
            self._lost()
            return False
        self._busy = True
        return True

    def take(self) -> Compared | None:
        """What came of the last pair, once it is known; never waits."""
        if not self._busy or self._process is None:
            return None
        descriptor = _pipe(self._process.stdout).fileno()
        if not select.select([descriptor], [], [], 0.0)[0]:
            return None
        self._said += (data := os.read(descriptor, 1 << 16))
        if not data:
            self._lost()
            return None
        line, newline, rest = self._said.partition(b"\n")
        if not newline:
            return None
        self._said, self._busy = rest, False
        found = json.loads(line)
        return Compared(found["seq"], found["difference"])

    def _start(self) -> bool:
        if self._process is not None:
            return True
        if time.monotonic() < self._not_before_s:
            return False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, *self._arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self.problem = f"outputs are not compared: {error}"
            self._not_before_s = time.monotonic() + _AGAIN_S
            return False
        with suppress(OSError):  # beyond what the user may have in pipes
            fcntl.fcntl(_pipe(self._process.stdin).fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.problem = ""
        return True

    def _lost(self) -> None:
        code = self.close()
        self.left_out += 1
        self.problem = f"outputs are not compared: the process that does it ended with status {code}"
        self._not_before_s = time.monotonic() + _AGAIN_S

    def close(self) -> int | None:
        """End the process; returns its exit status, None if there was none."""
        process, self._process, self._busy, self._said = self._process, None, False, b""
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                _pipe(pipe).close()
        return process.wait()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def main() -> None:
    """The process: read pairs from stdin until it ends, and say of each whether they are the same."""
    from torchperf_ros.workers.process_setup import set_nice

    set_nice(os.getpid(), _NICE)
    (kind, tolerance), source = sys.argv[1:], sys.stdin.buffer
    rules = _rules(kind, float(tolerance))
    while head := source.read(_HEAD.size):
        seq, served, other = _HEAD.unpack(head)
        difference = _difference(source.read(served), source.read(other), kind, rules)
        print(json.dumps({"seq": seq, "difference": difference}), flush=True)


def _rules(kind: str, tolerance: float) -> "Rules":
    """The rules of golden comparison; only what is built in names fields that may be anything, or are matched."""
    from torchperf_ros.replay.golden.message_rule import BUILT_IN, MessageRule, Tolerance

    own = BUILT_IN.get(kind, MessageRule())
    allowed = {path: Tolerance(tolerance) for path in ("", *own.tolerances)}
    return {**BUILT_IN, kind: replace(own, tolerances=allowed)}


def _difference(served: bytes, other: bytes, kind: str, rules: "Rules") -> str:
    """The first difference in words; "" for none. What cannot be compared counts as different."""
    if served == other:
        return ""
    from torchperf_ros.config.message_types import decode
    from torchperf_ros.replay.golden.message_rule import ComparisonError, compare_messages

    try:
        found = next(iter(compare_messages(decode(other, kind), decode(served, kind), rules)), None)
    except ComparisonError as error:
        return str(error)
    return "" if found is None else f"{found.path} is {found.value}, in the version that serves {found.golden}"
