"""The MCAP files that a replay writes: outputs as they come, and golden outputs."""

import contextlib
import queue
import threading
from pathlib import Path
from typing import Any, Final

from mcap.writer import CompressionType, Writer

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import full_name, typestore
from torchperf_ros.replay.replay_options import ReplayError

# messages; a writer that is slower than this holds up the replay, which loses nothing
_WAITING: Final = 256


class OutputLog(contextlib.AbstractContextManager["OutputLog"]):
    """An MCAP file with message definitions; a context that leaves all of it, or nothing under its `path`.

    A thread writes it, so that no stage waits for the disk.
    """

    def __init__(
        self, path: Path, compress: bool = True, metadata: tuple[str, dict[str, str]] | None = None
    ) -> None:
        """Begin the file, with `metadata`, a named table of texts.

        To compress images is not worth the time.

        Raises:
            ConfigError: the name cannot be that of an MCAP file.
            OSError: it cannot be written.
        """
        if path.suffix != ".mcap" or path.is_dir() or not path.resolve().parent.is_dir():
            raise ConfigError(
                f"output {path}: has to be a file that ends in .mcap, in a folder that exists"
            )
        self.path, self._part = path, path.with_name(f".{path.name}.part")
        self._file = self._part.open("wb")
        how = CompressionType.ZSTD if compress else CompressionType.NONE
        self._writer: Any = Writer(self._file, compression=how)  # its own types are partial
        self._writer.start(profile="ros2", library="torchperf_ros")
        if metadata is not None:
            self._writer.add_metadata(*metadata)
        self._schemas: dict[str, int] = {}
        self._channels: dict[tuple[str, str], int] = {}
        self._error: Exception | None = None
        self._queue: queue.Queue[tuple[str, str, bytes, int, int, int] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="output-log", daemon=True)
        self._thread.start()

    def write(
        self,
        topic: str,
        type_name: str,
        data: bytes,
        log_ns: int,
        publish_ns: int | None = None,
        seq: int = 0,
    ) -> None:
        """Have a message written, from any thread.

        One topic's messages keep their order. Errors: see `check`.
        """
        if self._error is None:
            self._queue.put(
                (topic, type_name, data, log_ns, log_ns if publish_ns is None else publish_ns, seq)
            )

    def check(self) -> None:
        """Ask whether all is well; the replay's thread does, as a stage's thread has no use for the answer.

        Raises:
            OSError: writing has failed, as on a full disk.
            ReplayError: a message cannot be written.
        """
        if isinstance(self._error, OSError):  # writing to an open file does not know its name
            raise OSError(self._error.errno, self._error.strerror, str(self.path)) from self._error
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Write what is left, and give the file its name.

        Where not all can be written it gets none, see `check`.
        """
        self._end()
        try:
            if self._error is None:
                self._writer.finish()
                self._file.close()
                self._part.replace(self.path)
        except OSError as error:
            self._error = error
        self.discard()
        self.check()

    def discard(self) -> None:
        """Leave nothing behind; after `close` this does nothing."""
        self._end()
        with contextlib.suppress(OSError):  # a full disk says so again when the buffer is flushed
            self._file.close()
        self._part.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.discard()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:  # else `check` raises it, and the queue is emptied until then
                try:
                    self._add(*item)
                except OSError as error:
                    self._error = error
                except (
                    Exception
                ) as error:  # the thread's boundary: an unknown type, a time before 1970, ...
                    msg = (
                        f"output {self.path}: a message of {item[0]} ({item[1]}) cannot be written: {error}"
                    )
                    self._error = ReplayError(msg)

    def _add(self, topic: str, type_name: str, data: bytes, log_ns: int, publish_ns: int, seq: int) -> None:
        if (topic, type_name) not in self._channels:
            name = full_name(type_name)
            if name not in self._schemas:
                text, _ = typestore({name}).generate_msgdef(name, ros_version=2)
                self._schemas[name] = self._writer.register_schema(name, "ros2msg", text.encode())
            self._channels[topic, type_name] = self._writer.register_channel(
                topic, "cdr", self._schemas[name]
            )
        channel = self._channels[topic, type_name]
        self._writer.add_message(channel, log_time=log_ns, data=data, publish_time=publish_ns, sequence=seq)
