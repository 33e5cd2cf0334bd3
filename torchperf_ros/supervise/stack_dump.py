"""Where every thread of the node and of its workers is just now, whatever holds it there."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from torchperf_ros.supervise.protocol import STACK_FILE, STACK_SIGNAL
from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.supervise.worker_process import WorkerProcess

_WAIT_S = 0.1
_STEP_S = 0.01


def stacks(stages: Iterable[StageActor]) -> str:
    """Text with the stacks of this process and of every worker that is ready. Takes up to 0.1 s per worker."""
    parts = ["== node ==\n" + node_stacks()]
    for stage in stages:
        for worker in stage.crew.everyone:
            title = f"== {stage.config.name} worker {worker.number} (pid {worker.pid}) =="
            parts.append(f"{title}\n{worker_stacks(worker)}")
    return "\n".join(parts)


def node_stacks() -> str:
    """Stacks of this process's threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def worker_stacks(worker: WorkerProcess) -> str:
    """Stacks of a worker's threads, most recent call first; also of one that hangs or holds its interpreter lock."""
    if worker.ready_at_ns is None:
        return f"not ready: {worker.state}\n"
    file = Path(worker.folder) / STACK_FILE
    before = _size(file)
    try:
        signal.pidfd_send_signal(worker.pidfd, STACK_SIGNAL)
    except ProcessLookupError:
        return "gone\n"
    give_up_at = time.monotonic() + _WAIT_S
    size = before
    while time.monotonic() < give_up_at:  # until it has begun, and then until it has come to the end
        time.sleep(_STEP_S)
        last, size = size, _size(file)
        if size == last > before:
            break
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            text.seek(before)
            return text.read() or "no answer: it does not even take signals\n"
    except OSError as error:
        return f"cannot be read: {error}\n"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
