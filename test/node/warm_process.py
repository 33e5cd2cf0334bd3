"""A process that has imported what nodes, their workers and commands import, which takes seconds.

They are forks of it.

Run as a program, with a socket to the tests. Each request says what to be, with which command line and
environment, and comes with the file to print to; the answer is the process id. A node that is such a fork
does not start a process which imports torch for its workers, see `torchperf_ros/workers/fork_server.py`: it
forks that, too. And it reports four times a second, for which tests wait most of their time. It ends
without taking leave of the graph, where its name stays for 20 s: the middleware does that while the
interpreter ends, which crashes in a fork with torch in it.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from types import SimpleNamespace

import psutil

BASE = "forked_base"
"""The name of the process that a node forks its workers from: its command line is that of this program."""
_MOST_BYTES = 1 << 17
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_IMPORTED = (
    *(
        f"torchperf_ros.{name}"
        for name in ("node.node", "worker.session", "tools.main", "replay.logs.play", "observe.top")
    ),
    *(
        "numpy.ma",
        "numpy.random",
        "sensor_msgs.msg",
        "nav_msgs.msg",
        "diagnostic_msgs.msg",
        "lifecycle_msgs.srv",
    ),
)


class WarmProcess:
    """The process, seen from the tests."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, what, words, environment, prints):
        """Start a `node`, or the command `torchperf`; it prints to a file.

        Args:
            what: one of these.
            words, environment: its command line and its environment variables.
            prints: descriptor of the file.
        """
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it becomes a child of these tests
        try:
            request = {
                "what": what,
                "words": words,
                "environment": dict(environment),
                "folder": os.getcwd(),
            }
            socket.send_fds(self._socket, [json.dumps(request).encode()], [prints])
            return Forked(int(self._socket.recv(_MOST_BYTES)))
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self):
        self._socket.close()
        self._process.wait()


class Forked(psutil.Process):
    """A process with what `psutil.Popen` has beside."""

    returncode = None

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = super().wait(timeout)
        return self.returncode

    def poll(self):
        with contextlib.suppress(psutil.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            super().kill()


# -- in the process


def main():
    tests = socket.socket(fileno=int(sys.argv[1]))
    for module in _IMPORTED:
        importlib.import_module(module)
    importlib.import_module("torchperf_ros.api.messages").message_class("std_msgs/msg/Header")  # the store
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(tests, _MOST_BYTES, 1)
        if not request:
            return
        numbers, theirs = os.pipe()
        between = os.fork()
        if between == 0:  # its end makes what it forks a child of the tests
            wanted = os.fork()
            if wanted == 0:
                _run(partial(_be, *descriptors, **json.loads(request)))
            os.write(theirs, str(wanted).encode())
            os._exit(0)
        os.waitpid(between, 0)
        tests.send(os.read(numbers, _MOST_BYTES))
        for descriptor in (numbers, theirs, *descriptors):
            os.close(descriptor)


def _run(act):
    """End as a program does that has done this; never returns."""
    status = 1
    try:
        status = act()
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _be(prints, what, words, environment, folder):
    os.setsid()
    for own in (1, 2):
        os.dup2(prints, own)
    _close_all_but()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is another environment's
    random.seed()
    os.chdir(folder)
    sys.path[:1] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]  # as `python -m` has it
    if what == "torchperf":
        sys.argv = ["torchperf", *words]
        return importlib.import_module("torchperf_ros.tools.main").app()
    importlib.import_module("torchperf_ros.node.reporter")._EVERY_S = 0.25
    gc.unfreeze = lambda: None  # or it would look through all that torch has imported
    importlib.import_module("torchperf_ros.workers.fork_server").subprocess = SimpleNamespace(
        DEVNULL=subprocess.DEVNULL, Popen=_start_base, TimeoutExpired=subprocess.TimeoutExpired
    )
    return importlib.import_module("torchperf_ros.node.main").main(words)


def _close_all_but(*kept):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the one of the listing
                os.close(descriptor)


def _be_base(node):
    ctypes.CDLL(None).prctl(_PR_SET_NAME, BASE.encode(), 0, 0, 0)
    sys.argv = ["fork_main", str(node)]
    return importlib.import_module("torchperf_ros.worker.fork_main").main()


def _start_base(command, *, pass_fds, **how):
    """A node has no other threads when it first starts a base.

    When it replaces one it has, and cannot fork.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        return subprocess.Popen(command, pass_fds=pass_fds, **how)
    return _ForkedBase(*pass_fds)


class _ForkedBase:
    """The process that workers are forked from, with what `subprocess.Popen` has."""

    def __init__(self, kept):
        self._code = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(partial(self._be, kept))

    def _be(self, kept):
        os.setsid()
        _close_all_but(kept)
        return _be_base(kept)

    def poll(self):
        return self._look(os.WNOHANG)

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, _timeout_s=None):
        return self._look(0)

    def _look(self, options):
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


if __name__ == "__main__":
    main()
