"""The errors of this package: a message says what, where, and what to do."""

import contextlib
import re
import signal
import sysconfig
import traceback
from itertools import dropwhile
from pathlib import Path
from typing import Final

_DECORATION: Final = re.compile(r"\x1b\[[0-9;]*m|^<class '[^']*'>: ")
# Lines with which converters begin.
_SAYS_NOTHING: Final = re.compile(
    r"step \d+/\d+|^Check '.*' failed|^FrontEnd API failed|^Model wasn't|^Summary:$|^## |^Exception from"
    r" |^Next steps"
)
_CAUSE: Final = re.compile(
    r"No conversion rule found|No ONNX function found|OpConversionFailure|not supported"
)
_PLACE: Final = re.compile(r'^ +File "([^"]+)", line (\d+), in ', re.MULTILINE)
_OURS: Final = str(Path(__file__).parents[1])
_NOT_THE_USERS: Final = ("<", _OURS, *{*sysconfig.get_paths().values()})
_LONGEST, _LONGEST_PLACE, _SAYS_ENOUGH = 300, 120, 30


class TorchperfError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(TorchperfError):
    """A parameter has a value that is not allowed; the message names it, the value, and what is."""


class BadInput(TorchperfError):
    """A message cannot be used; the frame gets the outcome `bad_input` and this text as its reason."""


class ProtocolError(TorchperfError):
    """The bytes between node and worker do not have the agreed form (version, kind or length)."""


class FrameOverwritten(TorchperfError):
    """The frame's bytes were replaced in the ring by newer ones before the worker was done with them."""


class UnknownMessageType(TorchperfError):
    """A message type is neither in the type store nor in an installed package's `.msg` files."""


class AdapterError(TorchperfError):
    """An adapter cannot be imported, built, or does not keep the adapter contract."""


def one_line(error: BaseException) -> str:
    """The line of an error that carries its cause.

    Of another error than this package's with type, and user's place.
    """
    lines = [_DECORATION.sub("", line).strip(" -") for line in str(error).strip().splitlines()]
    if isinstance(error, TorchperfError):
        return lines[0] if lines else "no reason was given"
    telling = [line for line in lines if line and not _SAYS_NOTHING.search(line)] or [
        *filter(None, lines),
        "",
    ]
    text = next((line for line in telling if _CAUSE.search(line)), telling[0])[:_LONGEST]
    named = f"{type(error).__name__}: {text or 'no reason was given'}"
    place = _PLACE.findall(str(error))  # of the user's line, as torch writes it
    where = f"{Path(place[-1][0]).name}:{place[-1][1]}" if place else _users_place(error)
    return f"{named} ({where})" if where and where not in named else named


def _users_place(error: BaseException) -> str:
    """File and line of the user's code that raised, else of any code where the error says next to nothing.

    Else "".
    """
    calls = traceback.extract_tb(error.__traceback__)
    called = dropwhile(lambda call: not call.filename.startswith(_OURS), calls)  # by this package
    theirs = [call for call in called if not call.filename.startswith(_NOT_THE_USERS)]
    if not theirs and len(str(error)) < _SAYS_ENOUGH:
        theirs = calls
    return (
        f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}: {theirs[-1].line}"[:_LONGEST_PLACE]
        if theirs
        else ""
    )


def how_it_ended(code: int) -> str:
    """In words how a process ended, for example `signal SIGKILL`.

    `code` is negative for a signal, as in `subprocess`.

    Of the real-time signals, which Python's enum does not name but for the first and last, it is
    `SIGRTMIN+N`.
    """
    if code >= 0:
        return f"exit status {code}"
    if signal.SIGRTMIN < -code < signal.SIGRTMAX:
        return f"signal SIGRTMIN+{-code - signal.SIGRTMIN}"
    with contextlib.suppress(ValueError):  # 32 and 33, which the C library keeps for itself
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
