"""The MCAP that a replay writes: a thread of its own, so that no stage waits for the disk."""

import contextlib
import queue
import threading
from pathlib import Path
from typing import Final

from mcap.writer import CompressionType, Writer

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.message_types import full_name, typestore
from torchperf_ros.replay.replay_error import ReplayError

_WAITING: Final = 256  # messages; a writer that is slower than this holds up the replay, which loses nothing
_ROS2: Final = 2
_LIBRARY: Final = "torchperf_ros"


class OutputLog:
    """Writes messages to a file beside `path`, which takes that name when all is written.

    Attributes:
        path: the log as it will be called.
    """

    def __init__(self, path: Path, *, compress: bool = True) -> None:
        """Begin the file.

        Args:
            path: its final name.
            compress: not worth the time where it holds images.

        Raises:
            ConfigError: the name cannot be that of an MCAP file.
            OSError: it cannot be written.
        """
        if path.suffix != ".mcap" or path.is_dir() or not path.resolve().parent.is_dir():
            msg = f"output {path}: has to be a file that ends in .mcap, in a folder that exists"
            raise ConfigError(msg)
        self.path = path
        self._part = path.with_name(f".{path.name}.part")
        self._file = self._part.open("wb")
        how = CompressionType.ZSTD if compress else CompressionType.NONE
        self._writer = Writer(self._file, compression=how)
        self._writer.start(profile="ros2", library=_LIBRARY)
        self._schemas: dict[str, int] = {}
        self._channels: dict[tuple[str, str], int] = {}
        self._error: Exception | None = None
        self._queue: queue.Queue[tuple[str, str, bytes, int] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="output-log", daemon=True)
        self._thread.start()

    def write(self, topic: str, type_name: str, data: bytes, t_ns: int) -> None:
        """Have a message written, from any thread; one topic's messages keep their order. Errors: see `check`."""
        if self._error is None:
            self._queue.put((topic, type_name, data, t_ns))

    def check(self) -> None:
        """Ask whether all is well; who replays does so, as a stage's thread has no use for the answer.

        Raises:
            OSError: writing has failed, as on a full disk.
            ReplayError: a message cannot be written.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what is left, and give the file its name.

        Raises:
            OSError, ReplayError: not all could be written; nothing is there under the final name.
        """
        self._queue.put(None)
        self._thread.join()
        try:
            self.check()
            self._writer.finish()  # type: ignore[no-untyped-call]
            self._file.close()
            self._part.replace(self.path)
        except OSError as error:
            raise self._named(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind; after `close` this does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        with contextlib.suppress(OSError):  # a full disk says so again when the buffer is flushed
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._add(*item)
                except OSError as error:  # told to who writes next; until then the queue is emptied
                    self._error = self._named(error)
                except Exception as error:  # the thread's boundary: an unknown type, a time before 1970, ...
                    msg = f"output {self.path}: a message of {item[0]} ({item[1]}) cannot be written: {error}"
                    self._error = ReplayError(msg)

    def _named(self, error: OSError) -> OSError:
        """The error with the name of the file, which writing to an open one does not know."""
        return OSError(error.errno, error.strerror, str(self.path))

    def _add(self, topic: str, type_name: str, data: bytes, t_ns: int) -> None:
        channel = self._channels.get((topic, type_name))
        if channel is None:
            channel = self._channels[topic, type_name] = self._writer.register_channel(
                topic, "cdr", self._schema(type_name)
            )
        self._writer.add_message(channel, log_time=t_ns, data=data, publish_time=t_ns)

    def _schema(self, type_name: str) -> int:
        name = full_name(type_name)
        if name not in self._schemas:
            text, _ = typestore({name}).generate_msgdef(name, ros_version=_ROS2)
            self._schemas[name] = self._writer.register_schema(name, "ros2msg", text.encode())
        return self._schemas[name]
