"""One log through the stages: the entry point of everything that replays.

And what came of it, as objects for tests and reports, and as the summary that `-o run.json` writes. Figures
of a stage know the frames behind them.
"""

import contextlib
import hashlib
import math
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchperf_ros import __version__
from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import decode
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.runs.run_log import RunLog, run_of
from torchperf_ros.observe.telemetry.machine import machine_facts
from torchperf_ros.replay.log_feed import KnownTopics, absolute, match_topics, topics_to_copy
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, Progress, Say
from torchperf_ros.replay.logs.player import ReadAhead
from torchperf_ros.replay.replay_options import (
    ReplayError,
    ReplayOptions,
    paced,
    params_hash,
    read_config,
    recording_in,
)
from torchperf_ros.replay.replay_record import OutputLog, ReplayRecord
from torchperf_ros.replay.replay_stages import RealPace, ReplayPace, ReplayStages
from torchperf_ros.stage.frame_table import output_hash
from torchperf_ros.stage.health import too_many_superseded
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.fork_server import start_base
from torchperf_ros.workers.process_setup import held_interrupt, step_back

_LONGEST_REASON: Final = 60


class StageFigure:
    """A figure of a stage.

    A number like any other, but a failed assertion on it shows the frames behind it.
    """

    stage: "StageResult"  # whose it is
    only_missed = True  # it counts frames that were not on time, rather than how long frames took


class _Float(StageFigure, float): ...


class _Count(StageFigure, int): ...


class _Counts(StageFigure, Counter[str]):
    def __repr__(self) -> str:
        return repr(dict(self))


_Figure = TypeVar("_Figure", bound=StageFigure)


def text_columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows as lines whose cells stand below each other; the last cell of a row may be of any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1] + [0]
    return [
        indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def stamp_text(stamp_ns: int) -> str:
    seconds, nanoseconds = divmod(int(stamp_ns), NS_PER_S)
    return f"{seconds}.{nanoseconds:09d}"


class PublishedFrame(NamedTuple):
    """What a stage published for a frame.

    The frame's number and `header.stamp`, the CDR bytes and their type.

    `check` is the guard's verdict, "" without a guard.
    """

    seq: int
    stamp_ns: int
    data: bytes
    type_name: str
    check: str = ""

    @property
    def message(self) -> Any:  # noqa: ANN401 - a rosbags message
        """Decoded by `rosbags`; arrays are numpy views."""
        return decode(self.data, self.type_name)


@dataclass(frozen=True, repr=False)
class StageResult:
    name: str
    tiers: tuple[str, ...]
    output_topic: str
    output_type: str
    budget_ms: float
    frames: NDArray[np.void]  # answered frames, rows of `FRAME`
    received: int
    superseded: int
    stale: int
    anomalies: tuple[tuple[int, Alert], ...]  # findings about this stage, with the time of the log in ns
    reasons: Mapping[int, str]  # why a frame was not on time, by its `seq`
    output: Path | None  # the MCAP that holds what it published, None if none was written
    synchronised: Mapping[int, str]  # its synchronised inputs: the adapter's number and topic of each

    @property
    def miss_ratio(self) -> float:
        """Share of the frames that came without a result of their own in time, 0 to 1.

        NaN without frames.
        """
        came = len(self.frames) + self.superseded
        in_time = np.count_nonzero(np.isin(self.frames["outcome"], IN_TIME))
        return self._figure(_Float((came - in_time) / came if came else "nan"))

    @property
    def too_many_superseded(self) -> bool:
        """Whether so many frames had no answer that the stage is too slow for its input.

        See `SupersededRule`.
        """
        return too_many_superseded(self.received, self.superseded)

    def quantile_ms(self, share: float) -> float:
        """Latency, receipt to publish, that this share (0 to 1) of the frames did not exceed.

        NaN without frames.
        """
        total_ms = self.frames["total_ms"]
        return self._figure(
            _Float(np.quantile(total_ms, share) if len(total_ms) else "nan"), only_missed=False
        )

    p50_ms = property(lambda self: self.quantile_ms(0.5), doc="Median latency.")
    p95_ms = property(lambda self: self.quantile_ms(0.95), doc="95th percentile of the latency.")
    p99_ms = property(lambda self: self.quantile_ms(0.99), doc="99th percentile of the latency.")
    max_ms = property(lambda self: self.quantile_ms(1.0), doc="Longest latency.")

    @property
    def outcomes(self) -> Counter[str]:
        """How many frames ended how, by word."""
        return self._counts("outcome", Outcome)

    @property
    def fallbacks(self) -> Counter[str]:
        """What was published instead of frames' own results how often, by word."""
        return self._counts("fallback", Fallback)

    @property
    def checks(self) -> Counter[str]:
        """What the guard made of outputs how often, by word; empty without a guard."""
        return self._counts("check", GuardVerdict)

    @property
    def incomplete(self) -> int:
        """How many frames had a synchronised input missing."""
        return self._figure(_Count(np.count_nonzero(self.frames["missing_inputs"] > 0)), only_missed=False)

    @property
    def missing(self) -> dict[str, int]:
        """Of each synchronised input that was missing ever, by topic: in how many frames."""
        bits: NDArray[np.int64] = self.frames["missing_inputs"]
        counts = {
            topic: int(np.count_nonzero(bits & (1 << index))) for index, topic in self.synchronised.items()
        }
        return {topic: count for topic, count in counts.items() if count}

    def _counts(self, column: str, words: type[Outcome | Fallback | GuardVerdict]) -> Counter[str]:
        pairs = zip(*np.unique(self.frames[column], return_counts=True), strict=True)
        return self._figure(
            _Counts({words(v).word: self._figure(_Count(count)) for v, count in pairs if v >= 0})
        )

    def _figure(self, figure: _Figure, *, only_missed: bool = True) -> _Figure:
        figure.stage, figure.only_missed = self, only_missed
        return figure

    @property
    def messages(self) -> Iterator[PublishedFrame]:
        """What the stage published, in order, read from the output MCAP as it is asked for.

        Raises:
            ReplayError: its messages were not kept, or are no longer there.
        """
        if self.output is None:
            raise ReplayError(f"stage {self.name}: its messages were not kept; replay with an output file")
        with LogReader(self.output) as log:
            messages = log.messages({self.output_topic})
            for frame in self.frames[self.frames["output_hash"] != 0]:
                found, seq = next(messages, None), int(frame["seq"])
                if found is None or output_hash(found.data) != frame["output_hash"]:
                    raise ReplayError(
                        f"{self.output}: is not what stage {self.name} published for frame {seq}; replay"
                        " again"
                    )
                check = GuardVerdict(frame["check"]).word if frame["check"] >= 0 else ""
                yield PublishedFrame(seq, int(frame["stamp_ns"]), found.data, found.type_name, check)

    def worst_frames(self, *, only_missed: bool) -> list[str]:
        """A table of the frames that took longest, or of the longest ones that were not on time."""
        frames = self.frames[self.frames["outcome"] != Outcome.ON_TIME] if only_missed else self.frames
        worst = frames[np.argsort(-frames["total_ms"], kind="stable")][:10]
        which = "not on time" if only_missed else "in all"
        unanswered = f", and {self.superseded} had no answer" if self.superseded else ""
        head = (
            f"{self.name}: {len(frames)} of {len(self.frames)} frames {which}{unanswered}; those that took"
            " longest:"
        )
        rows = [
            ("seq", "stamp", "total_ms", "outcome", "tier", "fallback", "reason"),
            *map(self._row, worst),
        ]
        return [head, *text_columns(rows)] if len(frames) else [f"{self.name}: no frame {which}"]

    def _row(self, frame: Any) -> tuple[str, ...]:  # noqa: ANN401 - a row of FRAME
        reason = self.reasons.get(int(frame["seq"]), "").partition("\n")[0]
        return (
            str(frame["seq"]),
            stamp_text(frame["stamp_ns"]),
            f"{frame['total_ms']:.1f}",
            Outcome(frame["outcome"]).word,
            self.tiers[frame["tier"]] if frame["tier"] >= 0 else "-",
            Fallback(frame["fallback"]).word if frame["fallback"] >= 0 else "-",
            reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}...",
        )

    def summary(self) -> dict[str, Any]:
        """Counts, latency, and what it is.

        What `-o run.json` writes of it; null stands for NaN, which JSON has not.
        """
        times_ms = {
            name: getattr(self, name) for name in ("miss_ratio", "p50_ms", "p95_ms", "p99_ms", "max_ms")
        }
        return {
            "name": self.name,
            "tiers": list(self.tiers),
            "output": self.output_topic,
            "type": self.output_type,
            "budget_ms": self.budget_ms,
            "received": self.received,
            "answered": len(self.frames),
            "superseded": self.superseded,
            "dropped": self.superseded,
            "stale": self.stale,
            "outcomes": dict(self.outcomes),
            "fallbacks": dict(self.fallbacks),
            "checks": dict(self.checks),
            "incomplete": self.incomplete,
            **{name: value if math.isfinite(value) else None for name, value in times_ms.items()},
            "reasons": {str(seq): reason.partition("\n")[0] for seq, reason in self.reasons.items()},
        }

    def __repr__(self) -> str:
        ends = ", ".join(f"{count} {word}" for word, count in self.outcomes.items())
        return f"<stage {self.name}: {len(self.frames)} frames, {ends or 'none answered'}>"


@dataclass(frozen=True)
class ReplayResult:
    log: Path  # what was replayed
    stages: Mapping[str, StageResult]  # by name, in the order of the parameters
    anomalies: tuple[tuple[int, Alert], ...]  # every finding, with the time of the log in ns
    summary: Mapping[str, Any]  # what `-o run.json` writes beside the frames; a JSON object
    output: Path | None  # the MCAP, None if none was written
    complete: bool = True  # False if it was interrupted

    def stage(self, name: str) -> StageResult:
        """One stage's result.

        Raises:
            KeyError: there is no such stage; the message names those that there are.
        """
        if name not in self.stages:
            raise KeyError(f"no stage {name!r}; there are: {', '.join(self.stages)}")
        return self.stages[name]

    @property
    def run(self) -> RunLog:
        return run_of(self.summary, {name: stage.frames for name, stage in self.stages.items()})


def log_hash(path: Path) -> str:
    """SHA-256 of a log: of the file, or of the names and contents of all files in the folder.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        if file != path:
            digest.update(os.fsencode(file.relative_to(path)) + f"\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def commit_of(folder: Path) -> str:
    """The commit that a folder's files are of, with `-dirty` where they differ from it.

    Empty outside of git.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a file system that hangs
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def models_summary(actors: Sequence[Stage]) -> dict[str, Any]:
    """Of the summary what workers know: to be asked while they are there.

    `model`: a hash of weights and code of all tiers, by stage. `engines`: by stage, by which engine each
    tier ran. `compile_s`: in which torch.compile made the first workers' tiers ready, None where no tier
    runs by it. `machine`: with what the models ran on, `cpu` or the name of a card, as another one's
    figures are not to be compared.
    """
    tiers = {
        actor.config.name: next(
            (each.reported.tiers for each in actor.pool.everyone if each.reported.tiers), ()
        )
        for actor in actors
    }
    models = {stage: "".join(tier.model for tier in of_stage) for stage, of_stage in tiers.items()}
    compiled = [tier.load_s for of_stage in tiers.values() for tier in of_stage if tier.engine == "compile"]
    described = next(
        (actor.pool.description for actor in actors if actor.pool.description is not None), None
    )
    return {
        "model": {
            stage: hashlib.sha256(text.encode()).hexdigest() if text else ""
            for stage, text in models.items()
        },
        "engines": {
            stage: ", ".join(f"{each.name} {each.engine}" for each in found)
            for stage, found in tiers.items()
        },
        "compile_s": sum(compiled) if compiled else None,
        "machine": machine_facts("" if described is None else described.card or described.device),
    }


def stage_results(
    actors: Sequence[Stage], record: ReplayRecord, output: Path | None
) -> dict[str, StageResult]:
    """What became of each stage's frames; `output` is the MCAP that holds what it published."""
    results = {}
    for index, actor in enumerate(actors):
        config, prefix, counters = actor.config, f"{actor.config.name}: ", actor.statistics.counters
        results[config.name] = StageResult(
            config.name,
            config.tiers,
            record.topics[index],
            record.types[index],
            config.budget_ms,
            record.tables[index].rows(),
            counters.frames,
            actor.mailbox.superseded,
            counters.stale,
            tuple(pair for pair in record.anomalies if pair[1].name.startswith(prefix)),
            record.reasons[index],
            output,
            (
                {}
                if actor.sync is None
                else {number: one.rule.topic for number, one in actor.sync.inputs.items()}
            ),
        )
    return results


def anomalies_summary(anomalies: Sequence[tuple[int, Alert]]) -> list[dict[str, Any]]:
    return [
        {
            "t_ns": t_ns,
            "level": a.level.name,
            "name": a.name,
            "message": a.message,
            "values": dict(a.values),
        }
        for t_ns, a in anomalies[:1000]
    ]


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
        yield from self._reader.part(topics, None if whole else self._start_ns, self._end_ns)

    def _cut_short(self, why: str) -> bool:
        self._note(why)
        for actor in self._stages.actors:  # what has begun is still answered
            actor.deactivate()
        return False
