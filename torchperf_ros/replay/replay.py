"""One log through the stages: the entry point of everything that replays."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.config import NodeConfig
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.replay.held_interrupt import held_interrupt
from torchperf_ros.replay.log_feed import LogFeed
from torchperf_ros.replay.logs.log_reader import LogError, LogReader
from torchperf_ros.replay.memory_series import MemorySeries
from torchperf_ros.replay.output_log import OutputLog
from torchperf_ros.replay.paces import FastPace, RealPace, ReplayPace
from torchperf_ros.replay.replay_config import paced, params_hash, read_config
from torchperf_ros.replay.replay_error import ReplayError
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_result import ReplayResult
from torchperf_ros.replay.replay_stages import ReplayStages
from torchperf_ros.replay.replay_summary import (
    anomalies_summary,
    compile_s,
    device_of,
    log_hash,
    model_hashes,
    place_summary,
    stage_results,
    stage_summary,
)
from torchperf_ros.replay.topic_map import match_topics
from torchperf_ros.replay.virtual.step_times_source import read_step_times
from torchperf_ros.replay.virtual.virtual_pace import VirtualPace

Progress = Callable[[int, int], None]
"""Told how much of how much of the log's time has been replayed, in ns; of 0 where its length is not known."""
Say = Callable[[str], None]
_MOST_TROUBLES: Final = 100
_BLACK_BOX: Final = "black_box"


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
    config = read_config(options, log)
    if options.output is not None and options.output.resolve().is_relative_to(log.resolve()):
        msg = f"output {options.output}: is in the log that is replayed; choose another place"
        raise ConfigError(msg)
    running = _Replay(options, config, progress, say)
    with LogReader(recording_in(log), running.note) as reader:
        return running.run(log, reader)


def recording_in(log: Path) -> Path:
    """The recording in a folder of evidence, beside whose records it lies; any other path itself."""
    black_box = log / _BLACK_BOX
    return black_box if black_box.is_dir() else log


def plan(log: Path, options: ReplayOptions) -> Iterator[str]:
    """What a replay would do, a line for each thing; the workers are started and asked what they take.

    Raises:
        As `replay` does.
    """
    config = paced(read_config(options, log), options.pace)
    notes: list[str] = []
    with LogReader(recording_in(log), notes.append) as reader, contextlib.ExitStack() as ending:
        record = ReplayRecord(config.stages, lambda: reader.start_ns, None)
        ending.callback(record.close)
        life = FastPace(reader.start_ns).life
        stages, topics = _start(
            ending,
            reader,
            options,
            notes.append,
            partial(ReplayStages, config, life, record, notes.append, options.seed),
        )
        yield f"log {log}: {max(0, reader.end_ns - reader.start_ns) / NS_PER_S:.1f} s"
        for topic in sorted(reader.topics.values(), key=lambda topic: topic.name):
            names = [name for name, of in topics.items() if of == topic.name]
            takers = [source.stage.config.name for name in names for source in stages.inputs(name)]
            count = f"{topic.count:,} messages" if topic.count >= 0 else "how many is not said"
            used = f", goes to {' and '.join(takers)}" if takers else ""
            yield f"  {topic.name} ({topic.type_name}), {count}{used}"
        for index, stage in enumerate(config.stages):
            tiers = ", ".join(stage.tiers)
            budget = "no deadline" if options.pace == "fast" else f"budget {stage.budget_ms:g} ms"
            yield f"stage {stage.name}: {tiers}; engine {stage.engine}, {budget}; gives {record.topics[index]}"
    yield from notes


def _start(
    ending: contextlib.ExitStack,
    reader: LogReader,
    options: ReplayOptions,
    note: Say,
    make: Callable[[str], ReplayStages],
) -> tuple[ReplayStages, dict[str, str]]:
    """Start stages that know the log's types, and find their topics in it."""
    definitions = ending.enter_context(tempfile.TemporaryDirectory(prefix="torchperf_types_"))
    reader.write_definitions(reader.topics, Path(definitions))
    stages = make(definitions)
    ending.callback(stages.stop)
    return stages, match_topics(stages.start(), reader.topics, options.remap, reader.path, note)


class _Replay:
    """One replay while it runs."""

    def __init__(self, options: ReplayOptions, config: NodeConfig, progress: Progress, say: Say) -> None:
        self._options, self._config, self._progress, self._say = options, config, progress, say
        self._troubles: list[str] = []

    def note(self, text: str) -> None:
        """Tell something, and keep it for the summary."""
        self._say(text)
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(text)

    def run(self, log: Path, reader: LogReader) -> ReplayResult:
        """Take the log through the stages."""
        self._log, self._reader, self._feed = log, reader, LogFeed(reader, self._options)
        options, config = self._options, paced(self._config, self._options.pace)
        identity = {"path": str(self._log), "sha256": log_hash(self._reader.path)}
        pace, virtual = self._pace(config), options.pace == "virtual"
        with contextlib.ExitStack() as ending:
            output = None
            if options.output is not None:
                output = OutputLog(options.output, compress=options.inputs == "none")
                ending.callback(output.discard)
            record = ReplayRecord(config.stages, pace.now, output, portable=virtual)
            ending.callback(record.close)
            # what workers say is told; at the virtual pace it is not kept, as it holds process ids
            told = self._say if virtual else self.note
            make = partial(ReplayStages, config, pace.life, record, told, options.seed)
            stages, topics = _start(ending, self._reader, options, self.note, make)
            self._feed.connect(topics, stages, output)
            actors = stages.actors
            models, compiled_s = model_hashes(actors), compile_s(actors)  # asked while the workers are there
            # neither memory nor what `/diagnostics` says of the machine knows virtual time
            memory = MemorySeries(() if virtual else actors, lambda use: record.vitals(use, actors))
            started_s = time.monotonic()
            complete = self._through(pace, stages, record, memory)
            took_s = time.monotonic() - started_s
            if output is not None:
                output.close()
            results = stage_results(actors, record, options.output)
            findings = asdict(self._reader.findings)
            duration_s = (pace.now() - self._feed.start_ns) / NS_PER_S
            summary = {
                "log": {**identity, "messages": self._feed.given, "duration_s": duration_s, "findings": findings},
                "params_sha256": params_hash(self._config), "model": models,
                "pace": options.pace, "seed": options.seed, **pace.summary,
                **place_summary(device_of(actors)), "start_up_s": stages.start_up_s, "compile_s": compiled_s,
                "took_s": took_s, "memory": memory.summary, "stages": [stage_summary(stage) for stage in results],
                "anomalies": anomalies_summary(record.anomalies), "unkept": record.lost, "troubles": self._troubles,
                "complete": complete,
            }  # fmt: skip
        by_name = {stage.name: stage for stage in results}
        return ReplayResult(self._log, by_name, tuple(record.anomalies), summary, options.output, complete)

    def _pace(self, config: NodeConfig) -> ReplayPace:
        options, start_ns = self._options, self._feed.start_ns
        if options.pace == "real":
            return RealPace(start_ns)
        if options.pace == "fast":
            return FastPace(start_ns)
        return VirtualPace(start_ns, read_step_times(options.step_times, self._log, config, options.seed, self.note))

    def _through(self, pace: ReplayPace, stages: ReplayStages, record: ReplayRecord, memory: MemorySeries) -> bool:
        """Take the log through the stages; whether that was all of it."""
        feed, complete = self._feed, True
        try:
            with contextlib.closing(feed.messages()) as messages:
                for message in messages:
                    pace.reach(message.t_ns, stages, record)
                    record.tick()
                    record.check()
                    memory.tick()
                    with held_interrupt():
                        feed.give(message)
                    self._progress(message.t_ns - feed.start_ns, feed.length_ns)
        except KeyboardInterrupt:  # what has been given is still answered, as at the end of a log
            self.note("interrupted: the results reach up to there")
            complete = False
        except ReplayError as error:
            if not feed.given:
                raise
            return self._cut_short(f"{error}; the results reach up to there", stages)
        except LogError as error:
            if not feed.given:
                raise
            self.note(f"replayed up to the damage: {error}")
        try:
            pace.finish(stages, record)
        except (KeyboardInterrupt, ReplayError) as error:
            return self._cut_short(f"{error or 'interrupted'}: the last answers are missing", stages)
        record.tick(end=True)
        record.check()
        if lost := record.pending - stages.unanswered + stages.lost:
            self.note(f"frames that were begun and never answered: {lost:,}")
        if complete:
            self._progress(feed.length_ns, feed.length_ns)
        return complete

    def _cut_short(self, why: str, stages: ReplayStages) -> bool:
        """Say why a replay ends here; no stage begins another frame."""
        self.note(why)
        stages.deactivate()
        return False
