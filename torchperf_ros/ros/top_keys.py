"""Single keys from a terminal, without waiting for them."""

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any


class Keys:
    """While it is open, keys come one by one and unseen; where standard input is no terminal, none ever come."""

    def __enter__(self) -> "Keys":
        self._before: list[Any] | None = None
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def pressed(self) -> str:
        """The keys since the last time, empty if there were none."""
        if self._before is None or not select.select([sys.stdin], [], [], 0)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
