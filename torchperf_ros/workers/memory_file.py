"""Anonymous memory that two processes share, and the order in which one sees the other's writes."""

import fcntl
import os
import platform
import threading

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_KEEPS_ORDER = platform.machine() in {"x86_64", "AMD64", "i686"}
_lock = threading.Lock()


def make_memory_file(name: str, size: int) -> int:
    """A descriptor of so many bytes that are taken as they are touched, and whose number never changes.

    Whoever maps a file reads beyond its end what ends the process (SIGBUS). A worker that cuts it off, as
    by a descriptor that its library has closed twice, would end the node: the kernel refuses that from now
    on.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only(fd: int) -> int:
    """Another descriptor of the same memory, which cannot be written to or mapped to write.

    To be closed as well.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def keep_order() -> None:
    """See to it that other processors see what was written before this call before what is written after it.

    Likewise what is read. x86 keeps the order of stores, and that of loads. ARM does not: there a reader
    could see the word that announces a change after the change. Python has no fence, but a lock that is
    released and taken again is
    one: what comes before a store-release stays before it, that before the load-acquire that follows it,
    and this before what comes after (ARM Architecture Reference Manual, B2.3, "barrier-ordered-before").
    """
    for _ in range(0 if _KEEPS_ORDER else 2):
        with _lock:
            pass
