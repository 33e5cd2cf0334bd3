"""Entry of the recorder: `python -m torchperf_ros.telemetry.recorder_main SOCKET RING STAGE_RING...` (descriptors).

Spawned by the node, never by hand, at low priority. It outlives a node that is killed, for as long as it takes
to write down what came before.
"""

import contextlib
import os
import signal
import socket
import sys

import psutil

from torchperf_ros.core.detachment import leave_priority
from torchperf_ros.supervise.realtime import keep_freed_memory
from torchperf_ros.telemetry.record_stream import EventRecord, StreamReader
from torchperf_ros.telemetry.recorder import Recorder

_NICE = 10  # at 19, a machine that is full leaves it too little to keep images: just when they matter


def main() -> int:
    """Take the setup, record, and end some time after the node at the latest."""
    leave_priority()
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    with contextlib.suppress(psutil.Error, OSError):  # a kernel without it: then the disk is shared evenly
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    for ending in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; the node says when it ends
        signal.signal(ending, signal.SIG_IGN)
    node_fd, ring_fd, *stage_fds = (int(word) for word in sys.argv[1:])
    node = socket.socket(fileno=node_fd)
    reader = StreamReader(node, ring_fd, stage_fds)
    setup = reader.read()  # the first thing that the node says
    assert isinstance(setup, EventRecord)
    node.setblocking(False)
    keep_freed_memory(os.fstat(ring_fd).st_size)
    Recorder(setup.fields, reader).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
