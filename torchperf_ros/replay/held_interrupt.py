"""Ctrl-C that waits while something is half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended; a second one does not wait.

    A frame that is given to a stage by halves is answered by nobody. Where Ctrl-C does not raise `KeyboardInterrupt`,
    or does so in another thread, this does nothing.

    Raises:
        KeyboardInterrupt: Ctrl-C has waited.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held = False

    def hold(_number: int, _frame: object) -> None:
        nonlocal held
        held = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt
