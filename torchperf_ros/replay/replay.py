"""One log through the stages: the entry point of everything that replays."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.config import NodeConfig
from torchperf_ros.replay.log_reader import LogError, LogMessage, LogReader
from torchperf_ros.replay.memory_series import MemorySeries
from torchperf_ros.replay.output_log import OutputLog
from torchperf_ros.replay.paces import FastPace, RealPace, ReplayPace
from torchperf_ros.replay.read_ahead import ReadAhead
from torchperf_ros.replay.replay_config import paced, params_hash, read_config
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_result import ReplayResult, StageResult
from torchperf_ros.replay.replay_stages import ReplayStages
from torchperf_ros.replay.replay_summary import (
    anomalies_summary,
    device_of,
    log_hash,
    model_hashes,
    place_summary,
    stage_summary,
)
from torchperf_ros.replay.step_times_source import read_step_times
from torchperf_ros.replay.topic_map import match_topics
from torchperf_ros.replay.virtual_pace import VirtualPace
from torchperf_ros.supervise.realtime import step_back

Progress = Callable[[int, int], None]
"""Told how much of how much of the log's time has been replayed, in ns; of 0 where its length is not known."""
Say = Callable[[str], None]
_MOST_TROUBLES: Final = 100
_AHEAD_BYTES: Final = 64 << 20


def replay(
    log: Path,
    options: ReplayOptions,
    progress: Progress = lambda _done, _total: None,
    say: Say = lambda _: None,
) -> ReplayResult:
    """Replay a log.

    Args:
        log: a rosbag2 folder, an `.mcap` or `.db3` file, or a ROS 1 `.bag`.
        options: how.
        progress: told how far it is.
        say: told in one line of what people should know: damage in the log, a worker that died.

    Raises:
        LogError: nothing of the log can be read, or it lacks a topic that a stage needs.
        ConfigError: a parameter is not allowed.
        ReplayError: a stage cannot run.
        OSError: the output cannot be written.
    """
    config = read_config(options)
    troubles: list[str] = []

    def note(text: str) -> None:
        say(text)
        if len(troubles) < _MOST_TROUBLES:
            troubles.append(text)

    with LogReader(log, note) as reader:
        return _Replay(reader, options, config, progress, note, troubles).run()


def plan(log: Path, options: ReplayOptions) -> Iterator[str]:
    """What a replay would do, a line for each thing; the workers are started and asked what they take.

    Raises:
        As `replay` does.
    """
    config = paced(read_config(options), options.pace)
    notes: list[str] = []
    with LogReader(log, notes.append) as reader, contextlib.ExitStack() as ending:
        record = ReplayRecord(config.stages, lambda: reader.start_ns, None)
        ending.callback(record.close)
        stages = ReplayStages(config, FastPace(reader.start_ns).life, record, notes.append)
        ending.callback(stages.stop)
        topics = match_topics(stages.start(), reader.topics, options.remap, log, notes.append)
        yield f"log {log}: {max(0, reader.end_ns - reader.start_ns) / NS_PER_S:.1f} s"
        for topic in sorted(reader.topics.values(), key=lambda topic: topic.name):
            takers = [
                s.stage.config.name for name, of in topics.items() if of == topic.name for s in stages.inputs(name)
            ]
            count = f"{topic.count:,} messages" if topic.count >= 0 else "how many is not said"
            used = f", goes to {' and '.join(takers)}" if takers else ""
            yield f"  {topic.name} ({topic.type_name}), {count}{used}"
        for index, stage in enumerate(config.stages):
            tiers = ", ".join(stage.tiers)
            budget = "no deadline" if options.pace == "fast" else f"budget {stage.budget_ms:g} ms"
            yield f"stage {stage.name}: {tiers}; engine {stage.engine}, {budget}; gives {record.topics[index]}"
    yield from notes


@dataclass
class _Copied:
    """The topics of the log that go into the output, and what becomes of each message."""

    output: OutputLog
    topics: frozenset[str]

    def copy(self, message: LogMessage) -> None:
        if message.topic in self.topics:
            self.output.write(message.topic, message.type_name, message.data, message.t_ns)


class _Replay:
    """One replay while it runs."""

    def __init__(
        self,
        reader: LogReader,
        options: ReplayOptions,
        config: NodeConfig,
        progress: Progress,
        note: Say,
        troubles: list[str],
    ) -> None:
        self._reader, self._options, self._config = reader, options, config
        self._progress, self._note, self._troubles = progress, note, troubles
        self._start_ns = reader.start_ns + round(options.start_s * NS_PER_S)
        whole = options.duration_s is None
        self._end_ns = None if whole else self._start_ns + round((options.duration_s or 0.0) * NS_PER_S)

    def run(self) -> ReplayResult:
        sha256 = log_hash(self._reader.path)
        config = paced(self._config, self._options.pace)
        pace = self._pace(config)
        with contextlib.ExitStack() as ending:
            output = self._open_output()
            if output is not None:
                ending.callback(output.discard)
            virtual = self._options.pace == "virtual"
            record = ReplayRecord(config.stages, pace.now, output, portable=virtual)
            ending.callback(record.close)
            stages = ReplayStages(config, pace.life, record, self._note)
            ending.callback(stages.stop)
            topics = match_topics(
                stages.start(), self._reader.topics, self._options.remap, self._reader.path, self._note
            )
            memory = MemorySeries(() if virtual else stages.actors)  # which knows no virtual time
            started_s = time.monotonic()
            messages, complete = self._feed(pace, stages, record, memory, topics, output)
            took_s = time.monotonic() - started_s
            if output is not None:
                output.close()
            results = self._stage_results(stages, record)
            summary = {
                "log": {
                    "path": str(self._reader.path), "sha256": sha256, "messages": messages,
                    "duration_s": (pace.now() - self._start_ns) / NS_PER_S,
                },
                "params_sha256": params_hash(self._config), "model": model_hashes(stages.actors),
                "pace": self._options.pace, "seed": self._options.seed, **pace.summary,
                **place_summary(device_of(stages.actors)), "start_up_s": stages.start_up_s, "compile_s": None,
                "took_s": took_s, "memory": memory.summary, "stages": [stage_summary(stage) for stage in results],
                "anomalies": anomalies_summary(record.anomalies), "unkept": record.lost, "troubles": self._troubles,
                "complete": complete,
            }  # fmt: skip
        return ReplayResult(
            self._reader.path, {stage.name: stage for stage in results}, tuple(record.anomalies), summary,
            self._options.output, complete,
        )  # fmt: skip

    def _pace(self, config: NodeConfig) -> ReplayPace:
        options = self._options
        if options.pace == "real":
            return RealPace(self._start_ns)
        if options.pace == "fast":
            return FastPace(self._start_ns)
        times = read_step_times(options.step_times, self._reader.path, config, options.seed, self._note)
        return VirtualPace(self._start_ns, times)

    def _open_output(self) -> OutputLog | None:
        if self._options.output is None:
            return None
        return OutputLog(self._options.output, compress=self._options.inputs == "none")

    def _feed(
        self,
        pace: ReplayPace,
        stages: ReplayStages,
        record: ReplayRecord,
        memory: MemorySeries,
        topics: dict[str, str],
        output: OutputLog | None,
    ) -> tuple[int, bool]:
        """Give the log to the stages; how many messages that were, and whether it was all of it."""
        routes: dict[str, list[str]] = {}
        for stage_topic, log_topic in topics.items():
            routes.setdefault(log_topic, []).append(stage_topic)
        takers = {topic: [s for name in names for s in stages.inputs(name)] for topic, names in routes.items()}
        copied = None if output is None else _Copied(output, self._inputs(frozenset(takers)))
        total_ns = max(0, (self._end_ns or self._reader.end_ns) - self._start_ns)
        count = 0
        wanted = frozenset(takers) | (copied.topics if copied is not None else frozenset())
        try:
            ahead = ReadAhead(self._messages(wanted), lambda message: len(message.data), _AHEAD_BYTES)
            with contextlib.closing(ahead):
                for message in ahead:
                    pace.reach(message.t_ns, stages, record)
                    record.tick()
                    memory.tick()
                    if copied is not None:
                        copied.copy(message)
                    if (sources := takers.get(message.topic)) is not None:
                        stages.offer(sources, message.data)
                        count += 1
                    self._progress(message.t_ns - self._start_ns, total_ns)
        except KeyboardInterrupt:
            self._note("interrupted: the results reach up to there")
            return count, False
        except LogError as error:
            if not count:
                raise
            self._note(f"replayed up to the damage: {error}")
        if not count:
            msg = f"log {self._reader.path}: has no message on {', '.join(sorted(takers)) or 'any topic'} in that time"
            raise LogError(msg)
        pace.finish(stages, record)
        record.tick(end=True)
        self._progress(total_ns, total_ns)
        return count, True

    def _messages(self, topics: frozenset[str]) -> Iterator[LogMessage]:
        if self._options.pace == "real":
            step_back()  # this runs on the thread that reads ahead
        whole = self._options.start_s == 0.0 and self._end_ns is None
        yield from self._reader.messages(topics, None if whole else self._start_ns, self._end_ns)

    def _inputs(self, used: frozenset[str]) -> frozenset[str]:
        """The topics to copy.

        Raises:
            LogError: one is not in the log.
        """
        if self._options.inputs in {"all", "none"}:
            return used if self._options.inputs == "all" else frozenset()
        names = frozenset(name.strip() for name in self._options.inputs.split(","))
        if unknown := sorted(names - set(self._reader.topics)):
            msg = f"--inputs: log {self._reader.path} has no topic {', '.join(unknown)}; give all, none or its topics"
            raise LogError(msg)
        return names

    def _stage_results(self, stages: ReplayStages, record: ReplayRecord) -> list[StageResult]:
        results = []
        for index, actor in enumerate(stages.actors):
            config, prefix = actor.config, f"{actor.config.name}: "
            results.append(
                StageResult(
                    config.name, config.tiers, record.topics[index], record.types[index], config.budget_ms,
                    record.tables[index].rows(), actor.journal.statistics.frames, actor.mailbox.superseded,
                    actor.mailbox.stale, tuple(pair for pair in record.anomalies if pair[1].name.startswith(prefix)),
                    record.reasons[index], self._options.output,
                )
            )  # fmt: skip
        return results
