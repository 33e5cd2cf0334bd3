"""ROS domains that nobody else on this machine uses."""

import contextlib
import functools
import os
import socket

DOMAINS = range(1, 101)  # the ports of higher ones may be those of any connection

_locks = []


@functools.cache
def own_domain(user=""):
    """A domain that this process has until it ends; each of its users gets another one.

    A name without a file is the lock: any user of the machine may take it, and it is the network's, as domains are.
    """
    first = os.getpid() % len(DOMAINS)
    for number in (*DOMAINS[first:], *DOMAINS[:first]):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as discovery:
            lock.bind(f"\0torchperf_test_domain_{number}")
            # where a participant of others would listen, by the DDS interoperability standard
            discovery.bind(("", 7400 + 250 * number))
            _locks.append(lock)
            return number
    raise RuntimeError("every ROS domain is in use")
