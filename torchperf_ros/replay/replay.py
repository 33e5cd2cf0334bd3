"""One log through the stages: the entry point of everything that replays."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from torchperf_ros import __version__
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.replay.log_feed import KnownTopics, absolute, match_topics, topics_to_copy
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader
from torchperf_ros.replay.logs.player import ReadAhead
from torchperf_ros.replay.output_log import OutputLog
from torchperf_ros.replay.replay_options import (
    ReplayError,
    ReplayOptions,
    paced,
    params_hash,
    read_config,
    recording_in,
)
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_result import (
    ReplayResult,
    anomalies_summary,
    commit_of,
    log_hash,
    models_summary,
    stage_results,
)
from torchperf_ros.replay.replay_stages import RealPace, ReplayPace, ReplayStages
from torchperf_ros.workers.fork_server import start_base
from torchperf_ros.workers.process_setup import held_interrupt, step_back

# Gets how much of how much of the log's time has been replayed, in ns.
#
# Of 0 where its length is not known.
Progress = Callable[[int, int], None]
Say = Callable[[str], None]
_MOST_TROUBLES: Final = 100


def replay(
    log: Path,
    options: ReplayOptions,
    progress: Progress = lambda _done, _total: None,
    say: Say = lambda _: None,
) -> ReplayResult:
    """Replay a log: a rosbag2 folder, an `.mcap` or `.db3` file, or a ROS 1 `.bag`.

    `say` gets a line for what people should know: damage in the log, a worker that died.

    Raises:
        LogError: nothing of the log can be read, or it lacks a topic that a stage needs.
        ConfigError: a parameter is not allowed.
        ReplayError: a stage cannot run.
        OSError: the output cannot be written.
    """
    if options.output is not None and options.output.resolve().is_relative_to(log.resolve()):
        raise ConfigError(f"output {options.output}: is in the log that is replayed; choose another place")
    with _Replay(log, options, progress, say) as running:
        return running.run()


def plan(log: Path, options: ReplayOptions) -> Iterator[str]:
    """What a replay would do, a line for each thing.

    The workers are started and asked. Raises what `replay` does.
    """
    with _Replay(log, replace(options, output=None), lambda _done, _total: None, lambda _: None) as running:
        yield from running.plan()


class _Replay(contextlib.ExitStack):
    def __init__(self, log: Path, options: ReplayOptions, progress: Progress, say: Say) -> None:
        super().__init__()
        self._log, self._options, self._progress, self._say = log, options, progress, say
        config = read_config(options, log)
        self._params_sha256, self._config = params_hash(config), paced(config, options.pace)
        self._troubles: list[str] = []
        self._given = 0

    def _note(self, text: str) -> None:
        self._say(text)
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(text)

    def _start(self) -> None:
        start_base()  # it imports torch meanwhile
        options, virtual = self._options, self._options.pace == "virtual"
        self._reader = self.enter_context(LogReader(recording_in(self._log), self._note))
        first_ns = self._reader.start_ns or next((message.t_ns for message in self._reader.messages()), 0)
        self._start_ns, length_s = first_ns + round(options.start_s * NS_PER_S), options.duration_s
        self._end_ns = None if length_s is None else self._start_ns + round(length_s * NS_PER_S)
        self._pace, self._output = self._make_pace(self._start_ns), None
        if options.output is not None:
            self._output = OutputLog(options.output, compress=options.inputs == "none")
            self.callback(self._output.discard)
        definitions = self.enter_context(tempfile.TemporaryDirectory(prefix="torchperf_types_"))
        self._reader.write_definitions(self._reader.topics, Path(definitions))
        self._record = ReplayRecord(self._config.stages, self._pace.now, self._output, portable=virtual)
        self.callback(self._record.close)
        # what workers say is shown; at the virtual pace it is not kept, as it holds process ids
        say = self._say if virtual else self._note
        self._stages = ReplayStages(self._config, self._pace, self._record, say, options.seed, definitions)
        self.callback(self._stages.stop)
        self._stages.start()
        for stage in self._config.stages:
            if stage.actions:
                self._note(
                    f"{stage.name}: its actions are not applied: most of their alerts are not found in a"
                    " replay"
                )
        if self._config.emergency.sensors:
            self._note(
                "the emergency lane is left out: no output is withheld, as it was while the lane was"
                " latched"
            )

    def _make_pace(self, start_ns: int) -> ReplayPace:
        options = self._options
        if options.pace != "virtual":
            return (RealPace if options.pace == "real" else ReplayPace)(start_ns)
        from torchperf_ros.replay.step_times import read_step_times
        from torchperf_ros.replay.virtual_stage import VirtualPace

        times = read_step_times(options.step_times, self._log, self._config, options.seed, self._note)
        return VirtualPace(start_ns, times)

    def _settle(self) -> None:
        reader, stages = self._reader, self._stages
        known = KnownTopics.of_incident(self._log)
        known = replace(known, outputs=known.outputs | {absolute(topic) for topic in stages.outputs})
        remap = self._options.remap
        stages.connect(match_topics(stages.wanted(), reader.topics, remap, reader.path, self._note, known))
        stages.settle()

    def plan(self) -> Iterator[str]:
        self._start()
        self._settle()
        reader = self._reader
        yield f"log {self._log}: {max(0, reader.end_ns - reader.start_ns) / NS_PER_S:.1f} s"
        for topic in sorted(reader.topics.values(), key=lambda topic: topic.name):
            takers = [source.stage.config.name for source in self._stages.takers.get(topic.name, ())]
            count = f"{topic.count:,} messages" if topic.count >= 0 else "their count unknown"
            used = f", goes to {' and '.join(takers)}" if takers else ""
            yield f"  {topic.name} ({topic.type_name}), {count}{used}"
        for stage, output in zip(self._config.stages, self._record.topics, strict=True):
            tiers = ", ".join(stage.tiers)
            budget = "no deadline" if self._options.pace == "fast" else f"budget {stage.budget_ms:g} ms"
            yield f"stage {stage.name}: {tiers}; engine {stage.engine}, {budget}; gives {output}"
        yield from self._troubles

    def run(self) -> ReplayResult:
        self._start()
        # while the workers start
        identity = {"path": str(self._log), "sha256": log_hash(self._reader.path)}
        commit = commit_of(Path.cwd())
        self._settle()
        options, pace, stages, record = self._options, self._pace, self._stages, self._record
        models, started_s = models_summary(stages.actors), time.monotonic()
        complete = self._through()
        took_s = time.monotonic() - started_s
        if self._output is not None:
            self._output.close()
        results = stage_results(stages.actors, record, options.output)
        duration_s = (pace.now() - self._start_ns) / NS_PER_S
        found = {
            "messages": self._given,
            "duration_s": duration_s,
            "findings": asdict(self._reader.findings),
        }
        summary = {
            "log": {**identity, **found},
            "params_sha256": self._params_sha256,
            "pace": options.pace,
            "seed": options.seed,
            **pace.summary,
            **models,
            "commit": commit,
            "torchperf_ros": __version__,
            "start_up_s": stages.start_up_s,
            "took_s": took_s,
            "memory": record.memory,
            "stages": [stage.summary() for stage in results.values()],
            "anomalies": anomalies_summary(record.anomalies),
            "unkept": record.lost,
            "troubles": self._troubles,
            "complete": complete,
        }
        return ReplayResult(self._log, results, tuple(record.anomalies), summary, options.output, complete)

    def _through(self) -> bool:
        reader, pace, stages, record, complete = self._reader, self._pace, self._stages, self._record, True
        length_ns = max(0, (self._end_ns or reader.end_ns) - self._start_ns)  # 0 if the log does not say
        copied: frozenset[str] = frozenset()
        if self._output is not None:
            copied = topics_to_copy(self._options.inputs, reader, stages.takers, stages.outputs)
        ahead = ReadAhead(self._read(copied.union(stages.takers)))
        try:
            with contextlib.closing(ahead) as messages:
                for message in messages:
                    pace.reach(message.t_ns, stages, record)
                    record.tick()
                    record.check()
                    record.sample(stages.actors)
                    with held_interrupt():
                        if self._output is not None and message.topic in copied:
                            self._output.write(message.topic, message.type_name, message.data, message.t_ns)
                        self._given += stages.offer(message.topic, message.data)
                    self._progress(message.t_ns - self._start_ns, length_ns)
            if not self._given:
                topics = ", ".join(sorted(stages.takers)) or "any topic"
                raise LogError(f"log {reader.path}: has no message on {topics} in that time")
        except KeyboardInterrupt:  # what has been given is still answered, as at the end of a log
            self._note("interrupted: the results reach up to there")
            complete = False
        except ReplayError as error:
            if not self._given:
                raise
            return self._cut_short(f"{error}; the results reach up to there")
        except LogError as error:
            if not self._given:
                raise
            self._note(f"replayed up to the damage: {error}")
        try:
            pace.finish(stages, record)
        except (KeyboardInterrupt, ReplayError) as error:
            return self._cut_short(f"{error or 'interrupted'}: the last answers are missing")
        record.tick(end=True)
        record.check()
        if lost := record.pending - stages.unanswered + stages.lost:
            self._note(f"frames that were begun and never answered: {lost:,}")
        if complete:
            self._progress(length_ns, length_ns)
        return complete

    def _read(self, topics: frozenset[str]) -> Iterator[LogMessage]:
        if self._options.pace == "real":
            step_back()  # this runs on the thread that reads ahead
        whole = self._options.start_s == 0.0 and self._end_ns is None
        yield from self._reader.messages(topics, None if whole else self._start_ns, self._end_ns)

    def _cut_short(self, why: str) -> bool:
        self._note(why)
        for actor in self._stages.actors:  # what has begun is still answered
            actor.deactivate()
        return False
