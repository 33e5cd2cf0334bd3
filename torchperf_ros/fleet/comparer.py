"""Frames as two versions of a stage have them: pairs, what they come to, and how their outputs differ.

Pairs come to counts and differences of times. A process of its own finds out whether outputs are the same
by the rules of golden comparison, whether the guard would replace one of them, and what the adapter's own
score says. Comparing takes the interpreter for milliseconds, which no thread of the node may do. One pair
at a time is out; what comes meanwhile is not compared, and counted.
"""

import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import psutil

from torchperf_ros.api.errors import how_it_ended
from torchperf_ros.api.outcome import IN_TIME, Outcome
from torchperf_ros.safety.guard import Guard, Known
from torchperf_ros.stage.frame import Answer

if TYPE_CHECKING:
    from torchperf_ros.replay.golden.message_rule import Rules


_RECENT: Final = 1024


@dataclass(frozen=True, slots=True)
class Pair:
    """One frame as both versions have it.

    Attributes:
        answer: how the version that serves has answered it.
        outcome: what the shadow came to: `on_time` stands for a good result, whenever it came.
        steps_ms: what decoding, preprocessing, inference and postprocessing took the shadow together; NaN:
            no result.
        served: output of the version that serves, CDR bytes, before the guard; None where it has no whole
            one.
        payload: the shadow's output, likewise.
        reason: why it has none.
        known: what the guard would judge plans by; None without one.
        disturbed: another frame was answered meanwhile, to which the shadow gives way: its time says
            nothing.
    """

    answer: Answer
    outcome: Outcome
    steps_ms: float
    served: bytes | None
    payload: bytes | None
    reason: str = ""
    known: Known | None = None
    disturbed: bool = False

    @property
    def timed(self) -> bool:
        return not (self.disturbed or math.isnan(self.steps_ms) or math.isnan(self.answer.steps.total_ms))

    @property
    def late(self) -> bool:
        """Whether the shadow would have missed the deadline, had it served.

        Its steps in place of the other's.

        Where it was disturbed only a result that is missing counts.
        """
        own_ms = self.answer.steps.total_ms
        rest_ms = self.answer.wait_ms if math.isnan(own_ms) else self.answer.total_ms - own_ms
        allowed_ms = self.answer.total_ms - self.answer.lateness_ms
        return self.payload is None or (not self.disturbed and rest_ms + self.steps_ms > allowed_ms)


class Compared(NamedTuple):
    """What came of the outputs of a pair.

    Attributes:
        seq: the frame's.
        difference: the first field that differs, "" if none does.
        refusals: why the guard would replace the base's plan, and the candidate's; "" where it would not.
        score: how far they are the same answer by the adapter's `score_messages`; None where it says
            nothing.
        problem: why there is no score.
    """

    seq: int
    difference: str
    refusals: Sequence[str] = ("", "")
    score: float | None = None
    problem: str = ""


@dataclass
class PairBlock:
    """Counts of pairs.

    Attributes:
        pairs, both: all pairs, and those whose times can be compared.
        base_late, candidate_late: pairs in which that version missed the deadline, or would have.
        compared, different: pairs whose outputs were compared, and differ.
        base_refused, candidate_refused: of these, plans that the guard would replace, and would not the
        other's. scored, score_sum: of these, pairs for which the adapter has a score, and these together.
        failed: pairs without a result of the candidate.
        base_ms, candidate_ms: what the steps took each, of `both`; of a block only, not of the total.
    """

    pairs: int = 0
    both: int = 0
    base_late: int = 0
    candidate_late: int = 0
    compared: int = 0
    different: int = 0
    base_refused: int = 0
    candidate_refused: int = 0
    scored: int = 0
    score_sum: float = 0.0
    failed: int = 0
    base_ms: list[float] = field(default_factory=list)
    candidate_ms: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        return self.score_sum / self.scored if self.scored else math.nan


@dataclass
class PairFigures:
    """Totals since the candidate runs beside the version in service; one thread adds, others read.

    Attributes:
        version: the candidate's name.
        total: of all pairs.
        block: of those since the last `take_block`, which has to be called now and then.
        last_difference: of outputs, the last in words.
        last_refusal: of a plan of the candidate that the guard would replace, but not the base's; likewise.
        last_failure: why the candidate had no result, the last time.
    """

    version: str = ""
    total: PairBlock = field(default_factory=PairBlock)
    block: PairBlock = field(default_factory=PairBlock)
    last_difference: str = ""
    last_refusal: str = ""
    last_failure: str = ""
    _recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, pair: Pair, *, candidate_serves: bool) -> None:
        """Count a pair; the shadow is the base where the candidate serves."""
        answer = pair.answer
        served_late = answer.outcome not in IN_TIME
        late = (pair.late, served_late) if candidate_serves else (served_late, pair.late)
        failed = answer.fallback is not None if candidate_serves else pair.outcome is not Outcome.ON_TIME
        if failed:
            self.last_failure = answer.reason if candidate_serves else pair.reason
        if pair.timed:
            times_ms = (
                (pair.steps_ms, answer.steps.total_ms)
                if candidate_serves
                else (answer.steps.total_ms, pair.steps_ms)
            )
            self._recent_ms.append(times_ms[1] - times_ms[0])
            self.block.base_ms.append(times_ms[0])
            self.block.candidate_ms.append(times_ms[1])
        for block in (self.total, self.block):
            block.pairs += 1
            block.base_late += late[0]
            block.candidate_late += late[1]
            block.failed += failed
            block.both += pair.timed

    def compared(self, found: Compared) -> None:
        self.last_difference = found.difference or self.last_difference
        base, candidate = map(bool, found.refusals)
        if candidate and not base:
            self.last_refusal = found.refusals[1]
        for block in (self.total, self.block):
            block.compared += 1
            block.different += bool(found.difference)
            block.base_refused += base and not candidate
            block.candidate_refused += candidate and not base
            if found.score is not None:
                block.scored, block.score_sum = block.scored + 1, block.score_sum + found.score

    def take_block(self) -> PairBlock:
        block, self.block = self.block, PairBlock()
        return block

    def quantile_ms(self, share: float) -> float:
        """Of the candidate's time less the base's, of the last pairs; NaN before there is one."""
        ordered = sorted(self._recent_ms)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan

    @property
    def words(self) -> str:
        total = self.total
        parts = [f"{total.pairs} frames", f"{total.candidate_late} late (base {total.base_late})"]
        if total.both:
            parts.append(f"{self.quantile_ms(0.5):+.2f} ms p50, {self.quantile_ms(0.99):+.2f} ms p99")
        if total.compared:
            parts.append(f"{total.different} of {total.compared} outputs differ")
        if total.scored:
            parts.append(f"score {total.score:.3f}")
        if total.base_refused or total.candidate_refused:
            parts.append(f"{total.candidate_refused} plans refused (base {total.base_refused})")
        return ", ".join([*parts, *([f"{total.failed} without a result"] if total.failed else [])])


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
