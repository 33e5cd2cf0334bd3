"""Entry of the worker process: `python -m torchperf_ros.worker.main FRAMES CONTROL RING RESULT` (descriptors).

Spawned by the node, never by hand. What has to happen before torch is imported happens here.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from torchperf_ros.core.compiler_cache import use_compiler_cache
from torchperf_ros.core.detachment import detach_from_node
from torchperf_ros.core.errors import AdapterError, ConfigError, TorchperfError, UnknownMessageType
from torchperf_ros.supervise.protocol import MAX_CONTROL_BYTES, STACK_FILE, STACK_SIGNAL, pack_control, unpack_control
from torchperf_ros.worker.background import step_into_background

_PERMANENT = (AdapterError, ConfigError, UnknownMessageType)


def main() -> int:
    """Set up, report, serve until the node is gone. Returns the exit status."""
    detach_from_node()
    stacks_fd = os.open(Path(os.environ["TMPDIR"], STACK_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, stacks_fd, all_threads=True)  # answers without the interpreter lock
    for ending in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; the node ends its workers itself
        signal.signal(ending, signal.SIG_IGN)
    frames_fd, control_fd, ring_fd, result_fd = (int(word) for word in sys.argv[1:])
    for descriptor in (frames_fd, control_fd, ring_fd, result_fd):
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=control_fd)
    setup = unpack_control(control.recv(MAX_CONTROL_BYTES))
    if setup.get("definitions"):  # message types that no installed package has
        others = os.environ.get("AMENT_PREFIX_PATH", "")
        os.environ["AMENT_PREFIX_PATH"] = os.pathsep.join(filter(None, [setup["definitions"], others]))
    try:
        come_forward = step_into_background() if setup["background"] else lambda: None
        if setup.get("compile") and any(build["engine"] == "compile" for build in setup["build"]):
            setup["compiler_cache"] = use_compiler_cache(setup["cache_dir"], setup["cache_mib"] << 20)
        from torchperf_ros.worker.session import Session  # imports torch, which takes seconds

        session = Session(setup, control, socket.socket(fileno=frames_fd), ring_fd, result_fd)
        session.load()
        session.calibrate()
        come_forward()
        session.serve()
    except Exception as error:  # the process's boundary: the node shows this on /diagnostics
        text = str(error)
        if not isinstance(error, TorchperfError):
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):
            control.send(pack_control("error", text=text, permanent=isinstance(error, _PERMANENT)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
