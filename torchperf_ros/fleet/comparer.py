"""What two versions' outputs are to each other, found out in a process of its own.

That is whether they are the same by the rules of golden comparison, whether the guard would replace one of
them, and what the adapter's own score says. Comparing takes the interpreter for milliseconds, which no
thread of the node may do. One pair at a time is out; what comes meanwhile is not compared, and counted.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Final

import psutil

from torchperf_ros.api.errors import how_it_ended
from torchperf_ros.fleet.pair_figures import Compared
from torchperf_ros.safety.guard import Guard, Known

if TYPE_CHECKING:
    from torchperf_ros.replay.golden.message_rule import Rules

# wanted: a pair that fits never blocks its sender, however long the process stands
_PIPE_BYTES: Final = 1 << 20
_AGAIN_S: Final = 5.0  # after the process has ended
_HUNG_S: Final = 60.0
_STARVED: Final = 10  # times as long may one take that is no further for want of idle time
_ENTRY: Final = (
    # A child of a real-time node is real-time, before it has imported anything, too; and where the kernel
    # shares out time by sessions, the nice value of its session counts.
    "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "
    "from torchperf_ros.workers.process_setup import set_nice; set_nice(os.getpid(), 19); "
    "from torchperf_ros.fleet.comparer import main; main()"
)


class OutputComparer:
    """The node's side; one thread calls all but `hold`.

    Attributes:
        left_out: pairs that were not compared: another one was, they are too large, or the process had
            ended.
        problem: why it does not compare now, "" if it does.
    """

    def __init__(self, output_type: str, tolerance: float, scorer: Mapping[str, Any] | None = None) -> None:
        """Compare messages of this type, for example `nav_msgs/msg/Path`.

        The process starts with the first pair.

        Args:
            output_type: of both versions.
            tolerance: floating-point numbers are the same that are so near each other, in their unit.
            scorer: `adapter` and `options` of one that has a `score_messages`; None: nothing is scored.
        """
        self.left_out, self.problem = 0, ""
        self._arguments = [output_type, repr(tolerance), json.dumps(scorer)]
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = self._wanted = self._held = False
        self._lock = threading.Lock()
        self._since_s = self._not_before_s = 0.0
        self._room_bytes = 0  # of the pipe to the process
        self._said = b""

    def offer(self, seq: int, base: bytes, candidate: bytes, known: Known | None) -> bool:
        """Have a pair compared.

        False if it is left out. `known`: what the guard would judge by; None without one.
        """
        pair = b"" if self._busy or not self._start() else _written(seq, base, candidate, known)
        if self._process is None or not 0 < len(pair) <= self._room_bytes:
            self.left_out += 1
            return False
        self._busy, self._since_s = True, time.monotonic()
        self.hold(self._wanted)
        try:
            _pipe(self._process.stdin).write(pair)
        except OSError:
            self._lost()
            return False
        return True

    def hold(self, wanted: bool) -> None:
        """Stop the process where it is, at once, while it compares, or let it go on; on any thread."""
        with self._lock:
            self._wanted, due = wanted, wanted and self._busy
            if self._process is not None and due != self._held:
                self._process.send_signal(signal.SIGSTOP if due else signal.SIGCONT)
                self._held = due

    def take(self) -> Compared | None:
        """What came of the last pair, once it is known; never waits."""
        if not self._busy or self._process is None:
            return None
        descriptor = _pipe(self._process.stdout).fileno()
        if not select.select([descriptor], [], [], 0.0)[0]:
            since_s = time.monotonic() - self._since_s
            if since_s > _HUNG_S and (since_s > _STARVED * _HUNG_S or _sleeps(self._process.pid)):
                self._lost(f"gave no answer for {since_s:.0f} s")
            return None
        self._said += (data := os.read(descriptor, 1 << 16))
        if not data:
            self._lost()
            return None
        line, newline, rest = self._said.partition(b"\n")
        if not newline:
            return None
        self._said, self._busy = rest, False
        found = Compared(*json.loads(line))
        self.problem = found.problem
        return found

    def _start(self) -> bool:
        if self._process is not None:
            return True
        if time.monotonic() < self._not_before_s:
            return False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self.problem = f"outputs are not compared: {error}"
            self._not_before_s = time.monotonic() + _AGAIN_S
            return False
        pipe = _pipe(self._process.stdin).fileno()
        with suppress(OSError):  # beyond what the user may have in pipes
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._room_bytes = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        self.problem = ""
        return True

    def _lost(self, why: str = "") -> None:
        code = self.close()
        self.left_out += 1
        why = why or ("is not there" if code is None else f"ended by {how_it_ended(code)}")
        self.problem = f"outputs are not compared: the process that does it {why}"
        self._not_before_s = time.monotonic() + _AGAIN_S

    def close(self) -> int | None:
        """End the process; returns its exit status, None if there was none."""
        with self._lock:
            process, self._process, self._said = self._process, None, b""
            self._busy = self._held = False
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                _pipe(pipe).close()
        return process.wait()


def _sleeps(pid: int) -> bool:
    """Whether a process waits for something else than a processor, and is not stopped."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
    return True


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def main() -> None:
    """The process: read pairs from stdin until it ends, and say of each what came of it."""
    (kind, tolerance, scorer), source = sys.argv[1:], sys.stdin.buffer
    rules, score = _rules(kind, float(tolerance)), _Score(json.loads(scorer), kind)
    reported, sys.stdout = sys.stdout, sys.stderr  # an adapter may print
    for head in source:
        seq, *sizes, packed = json.loads(head)
        base, candidate = map(source.read, sizes)
        known = packed and Known.unpacked(packed)
        difference = _difference(base, candidate, kind, rules)
        refusals = [Guard.refusal(one, known) for one in (base, candidate)] if known else ["", ""]
        found = Compared(seq, difference, refusals, score(base, candidate), score.problem)
        print(json.dumps(found), file=reported, flush=True)


def _written(seq: int, base: bytes, candidate: bytes, known: Known | None) -> bytes:
    head = json.dumps([seq, len(base), len(candidate), known and known.packed()])
    return b"".join((head.encode(), b"\n", base, candidate))


class _Score:
    """The adapter's own, of two outputs; none until the adapter is made: that begins with the first pair.

    Attributes:
        problem: why there is none.
    """

    def __init__(self, scorer: Mapping[str, Any] | None, kind: str) -> None:
        self.problem = ""
        self._scorer, self._kind = scorer, kind
        self._scores: Callable[[object, object], float | None] | None = None

    def _make(self, adapter: str, options: dict[str, Any]) -> None:
        try:
            from torchperf_ros.api.adapter import on_one_cpu

            self._scores = on_one_cpu(adapter, options).score_messages
        except Exception as error:  # the user's code, likewise
            self.problem = f"adapter {adapter!r} cannot score: {type(error).__name__}: {error}"

    def __call__(self, base: bytes, candidate: bytes) -> float | None:
        if self._scorer is not None:  # torch takes seconds of idle time, for which no comparison waits
            threading.Thread(target=self._make, kwargs=self._scorer, daemon=True).start()
            self._scorer = None
        if self._scores is None:
            return None
        from torchperf_ros.api.messages import decode

        try:
            score = self._scores(decode(candidate, self._kind), decode(base, self._kind))
            self.problem = ""
            return None if score is None else float(score)
        except Exception as error:  # the user's code may raise anything; then there is no score
            self.problem = f"score_messages failed: {type(error).__name__}: {error}"
            return None


def _rules(kind: str, tolerance: float) -> "Rules":
    """The rules of golden comparison.

    Only what is built in names fields that may be anything.
    """
    from torchperf_ros.replay.golden.message_rule import BUILT_IN, MessageRule, Tolerance

    own = BUILT_IN.get(kind, MessageRule())
    allowed = {path: Tolerance(tolerance) for path in ("", *own.tolerances)}
    return {**BUILT_IN, kind: replace(own, tolerances=allowed)}


def _difference(base: bytes, candidate: bytes, kind: str, rules: "Rules") -> str:
    """The first difference in words; "" for none. What cannot be compared counts as different."""
    if base == candidate:
        return ""
    from torchperf_ros.api.messages import decode
    from torchperf_ros.replay.golden.message_rule import compare_messages

    found = next(iter(compare_messages(decode(candidate, kind), decode(base, kind), rules)), None)
    return "" if found is None else f"{found.path} is {found.value}, in the base {found.golden}"
