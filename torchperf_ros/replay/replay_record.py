"""What a replay writes down of its stages: outputs in a log, a row for each frame, and what was found."""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mcap.writer import CompressionType, Writer

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_S, monotonic_ns
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import full_name, typestore
from torchperf_ros.observe.telemetry.diagnostics import DIAGNOSTICS_TYPE, diagnostic_bytes, stage_status
from torchperf_ros.observe.telemetry.memory import LABELS, sample_memory
from torchperf_ros.observe.telemetry.rows import ROW_TYPE, LabelledArray, LatencyRecord, float64_bytes
from torchperf_ros.observe.watch.alert_grouping import AlertGrouping
from torchperf_ros.replay.log_feed import absolute
from torchperf_ros.replay.replay_options import NO_DEADLINE_MS, ReplayError
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.frame_table import FrameTable
from torchperf_ros.stage.stage import Stage

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


NODE: Final = "/perf"
_FLOAT: Final = "std_msgs/msg/Float64"
_MOST: Final = 10_000  # reasons and anomalies that are kept
_MOST_SAMPLES: Final = 4096
_MIB: Final = 1 << 20


class ReplayRecord:
    """Takes answers and findings from the stages' threads."""

    def __init__(
        self,
        stages: Sequence[StageConfig],
        now: Callable[[], int],
        output: OutputLog | None,
        *,
        portable: bool = False,
    ) -> None:
        """Start empty; `now` gives the log's time in ns, and messages go to the output.

        `portable`: leave out what differs from machine to machine: tracebacks, with their paths, memory and
        health.
        """
        self.tables = [FrameTable() for _ in stages]  # a row for each answered frame
        self.reasons: list[dict[int, str]] = [{} for _ in stages]  # why frames were not on time, by `seq`
        self.anomalies: list[tuple[int, Alert]] = []  # with the log's time in ns
        self.unkept = 0  # reasons and anomalies beyond the first 10,000 of each
        self.pending = 0  # frames that were offered to a stage and are not answered yet
        self.answered = threading.Condition()  # signalled after each answer; its lock guards `pending`
        self._rows = [LatencyRecord(index, stage.stream_number) for index, stage in enumerate(stages)]
        self.topics = [absolute(stage.output) for stage in stages]
        self.types = ["" for _ in stages]
        self._now, self._portable, self._output = now, portable, output
        self._failure: Exception | None = None
        self._grouping = AlertGrouping()
        self._labelled_memory = LabelledArray(LABELS)
        self._samples: list[tuple[float, float, float]] = []
        self._next_sample_s, self._sample_every_s = 0.0, 1.0
        self._next_tick_ns = 0

    # -- the stages' threads

    def publish(self, index: int, payload: bytes) -> None:
        if self._output is not None:
            self._output.write(self.topics[index], self.types[index], payload, self._now())

    def answer(self, index: int, answer: Answer) -> None:
        """A stage has answered a frame.

        What goes wrong here is raised by `check`, not in the stage's thread.
        """
        try:
            self._keep(index, answer)
        except Exception as error:  # the stage's thread has no use for it
            self._failure = self._failure or error
        with self.answered:
            self.pending -= 1
            self.answered.notify_all()

    def _keep(self, index: int, answer: Answer) -> None:
        if answer.budget_ms >= NO_DEADLINE_MS:
            answer = replace(answer, budget_ms=math.nan, lateness_ms=math.nan)
        t_ns, last = self._now(), index == len(self.tables) - 1
        answer_ms = answer.frame.origin.latency_ms(answer.published_ns) if last else math.nan
        self.tables[index].add(answer, t_ns, answer_ms)
        if answer.reason:
            if len(self.reasons[index]) < _MOST:
                self.reasons[index][answer.frame.seq] = answer.reason
            else:
                self.unkept += 1
        if self._output is not None:
            self._output.write(f"{NODE}/latency_stages", ROW_TYPE, self._rows[index].encode(answer), t_ns)
            if last:
                self._output.write(f"{NODE}/latency", _FLOAT, float64_bytes(answer_ms), t_ns)

    def found(self, alert: Alert) -> None:
        values = {
            key: value for key, value in alert.values.items() if key != "detail" or not self._portable
        }
        self._grouping.report(replace(alert, values=values), self._now())

    # -- the replay's thread

    def check(self) -> None:
        """Ask whether everything could be kept so far.

        Raises:
            OSError: the disk is full, for example.
            ReplayError: a message cannot be written.
        """
        if self._failure is not None:
            raise self._failure
        if self._output is not None:
            self._output.check()

    def offered(self) -> None:
        with self.answered:
            self.pending += 1

    def tick(self, *, end: bool = False) -> None:
        """Tell what was found, once in each second of the log, as the node does.

        At the `end` what is left.
        """
        now_ns = self._now()
        self._next_tick_ns = self._next_tick_ns or now_ns + NS_PER_S
        if now_ns < self._next_tick_ns and not end:
            return
        self._next_tick_ns = now_ns + NS_PER_S
        for event in self._grouping.tick(now_ns):
            kept = event[: max(0, _MOST - len(self.anomalies))]
            self.anomalies += [(now_ns, alert) for alert in kept]
            self.unkept += len(event) - len(kept)
            if self._output is not None:
                data = diagnostic_bytes(event, NODE, now_ns)
                self._output.write(f"{NODE}/anomaly", DIAGNOSTICS_TYPE, data, now_ns)

    def sample(self, stages: Sequence[Stage]) -> None:
        """Note the workers' memory once a second; put it and their health into the output as the node does."""
        now_s = time.monotonic()
        if self._portable or now_s < self._next_sample_s:
            return
        self._next_sample_s = now_s + self._sample_every_s
        memory = sample_memory(stages)
        self._samples.append((now_s, memory.workers_mib, memory.node_rss / _MIB))
        if len(self._samples) > _MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._sample_every_s *= 2
        if self._output is None:
            return
        now_ns, clock_ns = self._now(), monotonic_ns()
        healths = [(stage, stage.statistics.health.state(clock_ns)) for stage in stages]
        statuses = [stage_status(stage, health, memory.rss_by_pid) for stage, health in healths]
        self._output.write(f"{NODE}/memory", _FLOAT, float64_bytes(memory.workers_mib), now_ns)
        self._output.write(
            f"{NODE}/memory_stats", ROW_TYPE, self._labelled_memory.encode(memory.row()), now_ns
        )
        self._output.write(
            "/diagnostics", DIAGNOSTICS_TYPE, diagnostic_bytes(statuses, NODE, now_ns), now_ns
        )

    @property
    def memory(self) -> dict[str, Any]:
        """Time in ns from the first sample, MiB of workers (on CUDA the device's) and of this process."""
        return {
            "t_ns": [round((at_s - self._samples[0][0]) * NS_PER_S) for at_s, _, _ in self._samples],
            "rss_mib": [round(workers, 3) for _, workers, _ in self._samples],
            "own_rss_mib": [round(own, 3) for _, _, own in self._samples],
        }

    @property
    def lost(self) -> int:
        return self.unkept + self._grouping.lost

    def close(self) -> None:
        for table in self.tables:
            table.close()
