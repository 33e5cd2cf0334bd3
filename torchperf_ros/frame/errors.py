"""The errors of this package: a message says what, where, and what to do."""

import contextlib
import signal


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
    """An error's first line, with its type where it is not this package's."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no reason was given"
    return text if isinstance(error, TorchperfError) else f"{type(error).__name__}: {text}"


def how_it_ended(code: int) -> str:
    """In words how a process ended, for example `signal SIGKILL`; `code` is negative for a signal, as in `subprocess`.

    Of the real-time signals, which Python's enum does not name but for the first and last, it is `SIGRTMIN+N`.
    """
    if code >= 0:
        return f"exit status {code}"
    if signal.SIGRTMIN < -code < signal.SIGRTMAX:
        return f"signal SIGRTMIN+{-code - signal.SIGRTMIN}"
    with contextlib.suppress(ValueError):  # 32 and 33, which the C library keeps for itself
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
