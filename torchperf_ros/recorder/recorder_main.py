"""Entry of the recorder: `python -m torchperf_ros.recorder.recorder_main SOCKET SETUP RING STAGE_RING...`.

The arguments are descriptors. Spawned by the node, never by hand, at low priority. It outlives a node that is killed,
for as long as it takes to write down what came before.

It begins with the real-time priority of the node's thread that spawned it, and leaves it before it imports anything
that takes long: 0.3 s of imports at that priority kept a processor from the node itself, just as the first frames came.
"""

import contextlib
import json
import os
import signal
import socket
import sys

from torchperf_ros.workers.process_setup import keep_freed_memory, leave_priority

_MIB = 1 << 20
_NICE = 10  # at 19, a machine that is full leaves it too little to keep images: just when they matter


def main() -> int:
    """Take the setup, record, and end some time after the node at the latest."""
    leave_priority()
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    # The images of an incident, up to twice black_box_mib, go back to the system once they are written. Without these
    # bounds the C library learns from the first ones to keep such buffers: 280 MiB for the rest of the drive.
    keep_freed_memory(_MIB, _MIB)
    import psutil

    from torchperf_ros.recorder.recorder import Recorder
    from torchperf_ros.telemetry.record_stream import StreamReader

    with contextlib.suppress(psutil.Error, OSError):  # a kernel without it: then the disk is shared evenly
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    for ending in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; the node says when it ends
        signal.signal(ending, signal.SIG_IGN)
    node_fd, setup_fd, ring_fd, *stage_fds = (int(word) for word in sys.argv[1:])
    with os.fdopen(setup_fd, "rb") as file:
        setup = json.load(file)
    node = socket.socket(fileno=node_fd)
    node.setblocking(False)
    Recorder(setup, StreamReader(node, ring_fd, stage_fds)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
