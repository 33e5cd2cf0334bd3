"""The fork server's processes.

`python -m torchperf_ros.worker.fork_main SOCKET` is the base, the others are its forks.

See `workers/fork_server.py` for what they are for. The base imports torch; a stage's server imports the
adapter's module on top; a worker is a fork of that. Each ends when the socket to the node closes, and each
fork dies with the process that it was forked from.
"""

import contextlib
import errno
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.api.messages import message_class
from torchperf_ros.workers.process_setup import (
    die_with_parent,
    leave_priority,
    return_code,
    return_freed_memory,
)
from torchperf_ros.workers.protocol import MAX_CONTROL_BYTES, pack_control, unpack_control

_MOST_DESCRIPTORS = 253  # the kernel's limit for one message
_FAILED = 1
_REAP_AGAIN_MS = 1000
_AFTER_ERROR_S = 0.05
_OOM_SCORE = "300"  # of 1000: where memory runs out, a worker goes before the node that can replace it


def main() -> int:
    """The base: import torch, then fork stages' servers until the node is gone."""
    leave_priority()
    for ending in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # may reach the whole group; the node ends what it has started
        signal.signal(ending, signal.SIG_IGN)
    node = socket.socket(fileno=int(sys.argv[1]))
    node.set_inheritable(False)
    gc.disable()  # what is imported stays: the collector would look through it again and again
    importlib.import_module(
        "torchperf_ros.worker.preparation"
    )  # imports torch, which takes seconds; not before the
    # priority is right: what starts threads at its import, as numpy does, gives them the one of this moment
    for module in ("numpy.ma", "numpy.random"):  # percentiles import the one, each worker seeds the other
        importlib.import_module(module)
    message_class("std_msgs/msg/Header")  # makes the store of message types, 0.2 s
    _settle_memory()
    gc.enable()
    return _Forks(node).serve()


class _Forks:
    """Forks what the node asks for, and says how each worker ended, until the node closes its end.

    What a fork cannot get (a process, memory, a descriptor) is an answer to whoever asked for it: it costs
    none of the processes that live.
    """

    def __init__(self, node: socket.socket) -> None:
        self._node = node
        self._children: dict[
            int, tuple[int, bool]
        ] = {}  # by descriptor: process id, whether the node wants to know
        self._unreaped: list[tuple[int, bool]] = []  # ended, and held by whoever traces them
        self._poll = select.poll()

    def serve(self) -> int:
        self._poll.register(self._node, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll(_REAP_AGAIN_MS if self._unreaped else None):
                if descriptor in self._children:
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
                    self._unreaped.append(self._children.pop(descriptor))
                elif not self._hear():
                    return 0
            self._unreaped = [child for child in self._unreaped if not self._bury(*child)]

    def _hear(self) -> bool:
        """Do what the node asks for; False: it is gone."""
        try:
            data, passed, flags, _ = socket.recv_fds(self._node, MAX_CONTROL_BYTES, _MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        except OSError:  # the kernel has no memory for it: it is asked for again
            time.sleep(_AFTER_ERROR_S)
            return True
        if not data:
            return False
        request = unpack_control(data)
        try:
            if request["kind"] == "kill":
                self._kill(request["pid"])
                return True
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._fork(request, passed)
        except OSError as error:
            self._refuse(request, passed, str(error))
        finally:
            for each in passed:
                os.close(each)
        return True

    def _fork(self, request: dict[str, Any], passed: list[int]) -> None:
        for each in passed:
            os.set_inheritable(each, False)
        with (
            warnings.catch_warnings()
        ):  # numpy's threads are idle, and made anew in the fork when it needs them
            warnings.simplefilter("ignore", DeprecationWarning)
            parent, pid = os.getpid(), os.fork()
        if pid == 0:
            for each in (self._node.detach(), *self._children):
                with contextlib.suppress(OSError):  # the adapter's module has closed what is not its own
                    os.close(each)
            _become(request, passed, parent)
        is_worker, pidfd = request["kind"] == "worker", -1
        try:
            pidfd = os.pidfd_open(pid)
            if is_worker:
                socket.send_fds(
                    self._node, [pack_control("forked", pid=pid, number=request["number"])], [pidfd]
                )
        except OSError:  # the node cannot have it
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            if pidfd >= 0:
                os.close(pidfd)
            raise
        self._children[pidfd] = pid, is_worker
        self._poll.register(pidfd, select.POLLIN)

    def _refuse(self, request: dict[str, Any], passed: list[int], why: str) -> None:
        """Say that there is no such process.

        To the node, or where the socket of a stage's server leads to.
        """
        asks = self._node
        with contextlib.suppress(OSError):  # the node is gone: the next `recv` says so
            if request["kind"] == "worker":
                asks.send(pack_control("failed", number=request["number"], why=why))
            elif passed:
                asks = socket.socket(fileno=passed[0])
                try:
                    asks.send(pack_control("failed", number=0, why=why))
                finally:
                    asks.detach()

    def _kill(self, pid: int) -> None:
        """A worker that the node has no descriptor of.

        Until it is reaped, no other process has its number.
        """
        if any(pid == child for child, _ in self._children.values()):
            os.kill(pid, signal.SIGKILL)

    def _bury(self, pid: int, is_worker: bool) -> bool:
        """Reap a dead child, and first kill what it forked in its turn.

        That holds on to its sockets and memory.

        False: it cannot be reaped yet.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # until it is reaped, no other process has its number
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # the adapter's module has the kernel reap every child
            return True
        if not reaped:
            return False
        if is_worker:  # the end of a stage's server shows on the node's socket to it
            with contextlib.suppress(OSError):  # the node is gone: the next `recv` says so
                self._node.send(pack_control("exited", pid=pid, code=os.waitstatus_to_exitcode(status)))
        return True


def _become(request: dict[str, object], passed: list[int], parent: int) -> None:
    """Be what was asked for, in a new process; never returns."""
    code = _FAILED
    try:
        # a group of its own: a signal to it reaches no other process, and the kernel shares out time by group
        os.setsid()
        die_with_parent(parent)
        if request["kind"] == "server":
            code = _be_stage_server(socket.socket(fileno=passed[0]), str(request["module"]))
        elif request["kind"] == "worker":
            code = _be_worker(passed, str(request["folder"]))
        else:
            raise ProtocolError(f"unknown request {request['kind']!r}")
    except ConnectionError:  # the node is gone, or wants this one no more
        code = 0
    except BaseException:  # the process's boundary
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # nothing of what the parent has registered for its exit is ours


def _be_stage_server(node: socket.socket, module: str) -> int:
    pidfd = os.pidfd_open(os.getpid())
    socket.send_fds(node, [pack_control("hello", pid=os.getpid())], [pidfd])
    os.close(pidfd)
    why_bare = ""
    if module:
        threads = len(os.listdir("/proc/self/task"))
        with contextlib.suppress(Exception):  # the worker imports it again, and says what is wrong with it
            importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) != threads:
            why_bare = f"importing {module} starts threads, which no fork inherits"
        elif _has_gpu_open():
            why_bare = f"importing {module} opens a GPU, which no fork can use"
        if why_bare:
            node.send(pack_control("unfit", why=why_bare))
            return 0
        _settle_memory()
    node.send(pack_control("ready"))
    return _Forks(node).serve()


def _be_worker(passed: list[int], folder: str) -> int:
    from torchperf_ros.worker import preparation

    *sockets, prints = passed
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    os.close(prints)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it prints is there when it dies of the next line
    os.environ["TMPDIR"] = folder  # packages unpack there, and it may be killed
    importlib.import_module("numpy").random.seed()  # its parent's state would be every worker's
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    return preparation.main(*sockets)


def _settle_memory() -> None:
    """Keep the collector from touching, and so copying, what all forks share; give back what none needs."""
    gc.collect()
    gc.freeze()
    return_freed_memory()
    return_code()


def _has_gpu_open() -> bool:
    """Whether this process holds a GPU.

    CUDA has been initialised, and its context is of no use to a fork.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(
                ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap")
            ):
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
