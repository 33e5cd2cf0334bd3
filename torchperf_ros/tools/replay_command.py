"""`torchperf replay`: the command line, and how a replay is shown in a terminal."""

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.tools import shell
from torchperf_ros.tools.shell import File, Files, Texts

if TYPE_CHECKING:
    from rich.table import Table

    from torchperf_ros.replay.batch_tasks import BatchOptions
    from torchperf_ros.replay.replay import ReplayResult
    from torchperf_ros.replay.replay_options import ReplayOptions

_PARTIAL = 1
_GOOD = {
    "on_time",
    "partial",
    "late",
    "starting",
}  # outcomes of frames that the model has answered, or will
_PLAIN_WIDTH = 120
_OF_LOGS = (".mcap", ".db3", ".bag", ".zstd", ".yaml")  # what no output may replace in a log's folder
_IN_ONE_LOG = (
    "metadata.yaml",
    "black_box",
)  # what a folder holds that is a log, and none to search for logs
_WORST = 5


def replay(  # noqa: PLR0913, PLR0917 - one parameter for each option
    logs: Annotated[
        list[Path], Argument(help="rosbag2 folder, .mcap, .db3 or .bag; several, or folders of such.")
    ],
    params: Annotated[
        File, Option(metavar="FILE", help="Parameter file; default: of the incident, or none.")
    ] = None,
    sets: Annotated[
        Texts, Option("--set", metavar="NAME=VALUE", help="A parameter, in place of the file's.")
    ] = None,
    maps: Annotated[
        Texts, Option("--map", metavar="LOG:=STAGE", help="The log's topic for a stage's.")
    ] = None,
    pace: Annotated[
        str, Option(help="fast: no deadlines; real: as it was; virtual: on a virtual clock.")
    ] = "fast",
    times: Annotated[
        str, Option(metavar="log|FILE", help="For virtual: step times of the log, or of a file.")
    ] = "log",
    seed: Annotated[int, Option(help="Seed of the models' random numbers and of drawn times.")] = 0,
    start: Annotated[float, Option(min=0.0, metavar="S", help="Seconds of the log to leave out.")] = 0.0,
    duration: Annotated[
        float | None, Option(min=0.001, metavar="S", help="Seconds to replay; default: all.")
    ] = None,
    output: Annotated[
        Files,
        shell.outputs_option(
            "Outputs and /perf/*, MCAP (several logs: a folder); FILE.json, FILE.parquet: summary and a"
            " row for each frame.",
        ),
    ] = None,
    inputs: Annotated[
        str, Option(metavar="all|none|TOPICS", help="Topics to copy into the MCAP.")
    ] = "none",
    dry_run: shell.DryRun = False,
    parallel: Annotated[
        str,
        Option(
            metavar="N|tcp://HOST:PORT",
            help="Several logs: so many at a time here, 0: what fits; or on a Dask cluster.",
        ),
    ] = "0",
) -> None:
    """A log through the node's stages: the same workers as live, fed with its bytes.

    What comes out: each stage's outcomes and latencies here; outputs and /perf/*
    on the log's time line with -o OUT.mcap; a row for each frame with -o RUN.json or
    RUN.parquet, for `torchperf compare` and `torchperf report`.

    A stage's input is the log's topic of the same name, else the only one of its
    type; --map says otherwise. Damage in a log is shown and passed over.

    Several logs, or a folder of them, are replayed side by side, each with its
    results in a folder of -o (default: replays); what is done is kept, and the
    same command goes on where it stopped. A cluster's workers have to see logs
    and results under the same paths. Trust its scheduler: Dask sends pickles.

    Examples:
        torchperf replay drive.mcap -o out.mcap
        torchperf replay drive/ --pace real --params perception.yaml -o run.json
        torchperf replay incident/ --pace virtual --set perception.budget_ms=40
        torchperf replay logs/ --parallel 2 -o results

    Exit status: 0, or 1 if it was interrupted, a stage's every frame failed, more than a tenth of its
    frames had no answer, or some of several logs did so (what was done is written), or 2 for input that
    cannot be used.
    """
    if len(logs) == 1 and (logs[0].is_file() or any((logs[0] / name).exists() for name in _IN_ONE_LOG)):
        from torchperf_ros.workers.fork_server import start_base

        start_base()  # it imports torch while this process imports the rest
    with shell.console(stderr=True).status("loading"):
        from torchperf_ros.replay.batch_tasks import is_batch
        from torchperf_ros.replay.replay_options import ReplayOptions
        from torchperf_ros.settings.params_file import parse_value

    form = "LOG_TOPIC:=STAGE_TOPIC, for example /camera/front:=image"
    remap = shell.pairs("--map", maps or (), ":=", form, turned=True)
    named = shell.files_by_suffix(output, "", ".json", ".parquet", inputs=logs, kept=_OF_LOGS)
    target = named.pop("", None)
    own = shell.pairs("--set", sets or (), "=", "NAME=VALUE, for example perception.budget_ms=40.0")
    options = ReplayOptions(
        params,
        remap,
        pace,
        times,
        seed,
        start,
        duration,
        inputs,
        target,
        {name: parse_value(name, value) for name, value in own.items()},
    )
    files = list(named.values())
    scheduler = "" if parallel.isdecimal() else parallel
    if is_batch(logs):
        from torchperf_ros.replay.batch_tasks import BatchOptions

        at_once = 0 if scheduler else int(parallel)
        batch = BatchOptions(target or Path("replays"), at_once, scheduler)
        raise typer.Exit(_many(logs, options, batch, files, dry_run))
    if scheduler:
        raise ConfigError(
            "--parallel: an address is for several logs, or a folder of them; this is one log"
        )
    raise typer.Exit(0 if _one(logs[0], options, files, dry_run=dry_run) else _PARTIAL)


def _many(
    logs: list[Path], options: "ReplayOptions", batch: "BatchOptions", files: list[Path], dry_run: bool
) -> int:
    from torchperf_ros.replay.batch import plan_batch, replay_batch

    if files:
        raise ConfigError(
            f"{files[0]}: several logs write run.parquet and summary.json, each to its own folder in -o"
        )
    if options.inputs != "none":
        raise ConfigError(f"--inputs {options.inputs}: is for one log; of several no output is kept")
    shown = shell.console()
    if dry_run:
        for line in plan_batch(logs, options, batch):
            shell.say(shown, line)
        return 0
    shell.need("dask", "distributed", "pyarrow", "cryptography")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
    return replay_batch(logs, options, batch, shell.progress_bars(), shown)


def _one(log: Path, options: "ReplayOptions", files: list[Path], *, dry_run: bool) -> bool:
    errors, shown = shell.console(stderr=True), shell.console(_PLAIN_WIDTH)
    with errors.status("loading"):
        from torchperf_ros.observe.runs.run_log import check_run_path, write_run
        from torchperf_ros.replay.replay import plan
        from torchperf_ros.replay.replay import replay as play_back
        from torchperf_ros.replay.replay_options import prefer_this_process, read_config
    if options.inputs != "none" and options.output is None:
        raise ConfigError(
            f"--inputs {options.inputs}: there is no output to copy them into; give -o OUT.mcap"
        )
    for file in files:
        check_run_path(file)
    if dry_run:
        for line in plan(log, options):
            shell.say(shown, line)
        return True
    if options.pace == "real":
        scheduling = prefer_this_process(read_config(options, log))
        if ":" in scheduling:
            sys.stderr.write(f"scheduling is {scheduling}\n")
    with shell.progress_bars() as bars:
        result = play_back(
            log, options, shell.follow(bars, log.name, per_s=1e9), lambda text: shell.say(errors, text)
        )
    for file in files:
        write_run(result.run, file)
    shell.say(shown, f"{result.log}, times in ms")
    shown.print(_stage_table(result))
    for line in _lines(result):
        shell.say(shown, line)
    if written := [str(file) for file in (options.output, *files) if file]:
        shell.say(shown, f"wrote {', '.join(written)}")
    failed = [
        stage.name
        for stage in result.stages.values()
        if stage.outcomes and not _GOOD & stage.outcomes.keys()
    ]
    if failed:
        shell.fail(
            f"{' and '.join(failed)}: no frame was answered by the model; the first reasons are above",
            _PARTIAL,
        )
    if slow := [stage.name for stage in result.stages.values() if stage.too_many_superseded]:
        shell.fail(
            f"{' and '.join(slow)}: more than a tenth of the frames had no answer, see `dropped`", _PARTIAL
        )
    return result.complete


def _stage_table(result: "ReplayResult") -> "Table":
    from torchperf_ros.api.text import console_table, percent

    def counts(found: Mapping[str, int], plain: str = "") -> str:
        return ", ".join(
            f"{count:,} {word}" for word, count in Counter(found).most_common() if word != plain
        )

    timed, rows = result.summary["pace"] != "fast", list[list[str]]()
    for stage in result.stages.values():
        used = Counter(int(tier) for tier in stage.frames["tier"] if tier >= 0)  # which gave results
        tiers = [f"{stage.tiers[t]} {percent(n / len(stage.frames), 0)}" for t, n in used.most_common()]
        came, guard = len(stage.frames) + stage.superseded, counts(stage.checks, "accept")
        notes = [counts(stage.outcomes, "on_time"), counts(stage.fallbacks), guard and f"guard: {guard}"]
        rows.append(
            [
                stage.name,
                f"{len(stage.frames):,}",
                percent(stage.outcomes["on_time"] / came) if came else "-",
                *(f"{value:.1f}" for value in (stage.p50_ms, stage.p99_ms, stage.max_ms)),
                *([f"{stage.budget_ms:g}"] if timed else []),
                f"{stage.superseded:,}",
                ", ".join(tiers) or "-",
                "; ".join(filter(None, notes)) or "-",
            ]
        )
    heads = ("stage", ">frames", ">on time", ">p50", ">p99", ">max", *([">budget"] if timed else []))
    return console_table((*heads, ">dropped", "tiers", "not on time"), rows)


def _lines(result: "ReplayResult") -> Iterator[str]:
    from torchperf_ros.stage.frame_table import flow_of

    summary = result.summary
    log_s, took_s = summary["log"]["duration_s"], summary["took_s"]
    speed = (
        f", {log_s / took_s:.1f} times as fast as it was" if took_s and summary["pace"] != "real" else ""
    )
    yield (
        f"{log_s:.1f} s of log in {took_s:.1f} s{speed}; workers were ready after"
        f" {summary['start_up_s']:.1f} s"
    )
    if summary["pace"] == "fast" and any(_GOOD & stage.outcomes.keys() for stage in result.stages.values()):
        yield "every frame had all the time that it needed; with --pace real or virtual deadlines count"
    if summary.get("late_messages"):
        yield (
            f"{summary['late_messages']:,} messages were given late, up to"
            f" {summary['worst_late_ms']:.1f} ms"
        )
    for stage in result.stages.values():
        if stage.incomplete:
            which = ", ".join(f"{topic} in {count:,}" for topic, count in stage.missing.items())
            of = f"{stage.incomplete:,} of {len(stage.frames):,} frames"
            yield f"{stage.name}: {of} had a synchronised input missing: {which}"
        if stage.superseded:
            yield f"{stage.name}: {flow_of(stage.frames, stage.superseded).words}"
        frames: dict[str, list[int]] = {}
        for seq, reason in stage.reasons.items():
            frames.setdefault(reason.partition("\n")[0] or "no reason was given", []).append(seq)
        for reason, seqs in list(frames.items())[:_WORST]:
            more = f" and {len(seqs) - 1:,} more" if len(seqs) > 1 else ""
            yield f"{stage.name} frame {seqs[0]}{more}: {reason}"
        if left := sum(len(seqs) for seqs in list(frames.values())[_WORST:]):
            yield f"{stage.name}: {left:,} more for other reasons, see -o RUN.json"
    if result.anomalies:
        count = len(result.anomalies)
        yield (
            f"{count:,} {'anomaly' if count == 1 else 'anomalies'}, the first:"
            f" {result.anomalies[0][1].name}"
        )
