"""The commands on a model before it drives: check, inspect, tune, compile, the cache, and evidence.

Each imports what it needs when it runs.
"""

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.import_paths import look_here_after_python
from torchperf_ros.api.text import console_table
from torchperf_ros.settings.build_options import AUTO, ENGINES, MOST_LOSS, PACKAGE_SUFFIXES
from torchperf_ros.tools import shell

if TYPE_CHECKING:
    from rich.console import Console

    from torchperf_ros.settings.config import NodeConfig
    from torchperf_ros.workers.package_cache import CachedPackage


_OF_PACKAGES = {*PACKAGE_SUFFIXES.values()}
_READS_FRAMES = "torchperf_ros.tools.check"
_TABLE_WIDTH = 140
_MIB = 1 << 20
_COLUMNS = (
    *("stage", "tier", "engine", "package", ">MiB", ">compiled in", ">p50 / p99 ms"),
    *(">eager p50 / p99", ">faster", "parity"),
)


def compile_tiers(  # noqa: PLR0913, PLR0917 - one for each option
    adapter: Annotated[
        shell.Text, Argument(help="module:Class of the adapter whose tiers are compiled.")
    ] = None,
    params: Annotated[
        Path | None, Option(help="A node's parameter file: every stage, as the node wants it.")
    ] = None,
    tiers: Annotated[
        shell.Texts, Option("--tiers", "--tier", help="Only these; default: full,medium,fast.")
    ] = None,
    options: Annotated[shell.Text, Option(help="JSON object, handed to the adapter.")] = None,
    device: Annotated[shell.Text, Option(help="auto, cpu, cuda or cuda:N.")] = None,
    engine: Annotated[
        shell.Text, Option(help=f"{', '.join(PACKAGE_SUFFIXES)}, or {AUTO}: the fastest of them here.")
    ] = None,
    log: Annotated[
        Path | None, Option(help="A drive, whose frames calibrate int8_static; others are compared.")
    ] = None,
    output: Annotated[
        shell.Files,
        shell.outputs_option("Write packages here, not into the cache; FILE.json: every figure."),
    ] = None,
    force: shell.Force = False,
    dry_run: shell.DryRun = False,
) -> None:
    """Compile an adapter's tiers ahead of time, so that the node starts from packages.

    Each tier is exported, compiled by every engine that is installed, checked
    against eager on random inputs, timed beside it, and written as one package
    and one JSON manifest each; the fastest is what the node will run. What is
    there already, with the same weights, code, libraries and device, is neither
    built nor measured again.

    int8_static takes the ranges of its numbers from frames: those of --log, else
    `Adapter.score_inputs`. The node has no log, so such packages are built here.

    Examples: torchperf compile --params config/perception.yaml
              torchperf compile my_robot.segmenter:Segmenter --tiers full,fast

    Exit status: 0 if every package is there, 1 if one could not be built, 2 if the input cannot be used.
    """
    from torchperf_ros.settings.config import node_config
    from torchperf_ros.settings.params_file import read_params_file

    files = shell.files_by_suffix(output, "", ".json")
    folder, json_file = files.get(""), files.get(".json")
    if folder is not None and not folder.is_dir() and (folder.exists() or folder.suffix in _OF_PACKAGES):
        raise ConfigError(
            f"-o {folder}: needs a folder, in which each tier's package has its own name, as full.pt2"
        )
    only = shell.every_word(tiers)
    if (adapter is None) == (params is None):
        raise ConfigError("give what to compile: either an adapter, module:Class, or --params FILE")
    own = {"options": options, "engine": engine, "device": device}
    given = {name: value for name, value in own.items() if value is not None}
    if params is None:
        node = {"stages": ["adapter"], "device": given.pop("device", "auto")}
        values = given | {
            "adapter": adapter,
            "output": "output",
            "tiers": only or ["full", "medium", "fast"],
        }
        config = node_config(node, {"adapter": values})
    elif given:
        raise ConfigError(f"{', '.join(f'--{name}' for name in given)}: with --params, set it in the file")
    else:
        config = read_params_file(params)
    shown = shell.console(_TABLE_WIDTH)
    jobs = _jobs(
        config,
        only,
        {
            "out": folder and str(folder),
            "force": force,
            "dry_run": dry_run,
            "guessed": params is None and not only,
        },
    )
    built: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="torchperf_") as frames:
            for name, job in jobs.items() if log is not None else ():
                job["frames"] = _frames(job, str(log), str(Path(frames) / f"{name}.safetensors"), shown)
            built.extend(result for name, job in jobs.items() for result in _run(name, job, shown))
    finally:  # also where it was stopped, or there is no room for more
        _print(built, shown)
    if json_file is not None:
        shell.write_output(json_file, json.dumps(built, indent=2) + "\n")
    raise typer.Exit(any(result["kind"] == "failed" for result in built))


def _jobs(config: "NodeConfig", tiers: Sequence[str], more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    jobs = {}
    there = {tier for stage in config.whole_stages for tier in stage.tiers}
    if unknown := sorted(set(tiers) - there):
        raise ConfigError(f"--tiers {unknown[0]!r} is not there; there are {', '.join(sorted(there))}")
    for found in config.whole_stages:
        numbers = [number for number, name in enumerate(found.tiers) if not tiers or name in tiers]
        jobs[found.name] = {
            "adapter": found.adapter,
            # Each stream has the model that the first one builds.
            "options": found.options | ({"stream": found.streams[0]} if found.streams else {}),
            "device": config.device,
            "threads": config.worker_threads,
            "tiers": [found.tiers[number] for number in numbers],
            "build": [found.build_options(number).as_dict() for number in numbers],
            "packages": [found.packages[number] for number in numbers],
            "cache_dir": config.cache_dir,
            "cache_mib": config.cache_mib,
            **more,
        }
    return {name: job for name, job in jobs.items() if job["tiers"]}


def _frames(job: Mapping[str, Any], log: str, path: str, console: "Console") -> str:
    """The file of a log's frames as this job's adapter makes inputs of them.

    A process of its own writes it.

    Raises:
        ConfigError: the log cannot be read, or the adapter takes none of its frames.
    """
    from torchperf_ros.workers.compile_process import CompileProcess

    process = CompileProcess({**job, "log": log, "frames": path, "does": _READS_FRAMES}, background=False)
    try:
        with console.status(f"reading frames of {log}"):
            for message in process.messages():
                if message["kind"] == "frames":
                    shell.say(console, f"calibrates with {message['text']}")
                    return path
                if message["kind"] == "failed":
                    raise ConfigError(message["text"])
        raise ConfigError(f"--log {log}: {process.death_reason() or 'its process printed nothing'}")
    finally:
        process.close()


def _run(stage: str, job: dict[str, Any], console: "Console") -> Iterator[dict[str, Any]]:
    """Run a compile process to its end, with progress; gives what became of each tier.

    Raises:
        ConfigError: there is no such adapter, device or folder.
    """
    from torchperf_ros.workers.compile_process import AGAIN, CompileProcess

    tiers, waiting, goes_on = job["tiers"], list(job["tiers"]), True
    with shell.progress_bars() as progress:
        bar = progress.add_task(f"{stage}: loading torch and the adapter", total=len(tiers), at="")
        while goes_on:
            goes_on = False
            process = CompileProcess(job, background=False)
            try:
                for message in process.messages():
                    done = message.get("tier", "").split(", ")
                    if message["kind"] == "tier":
                        text = (
                            f"{stage}: {message['step']} {message['tier']} ({message['number']} of"
                            f" {len(tiers)})"
                        )
                        progress.update(bar, description=text)
                        if not console.is_terminal:
                            console.print(text)
                    elif message["kind"] == "tiers":
                        tiers, waiting = message["tiers"], list(message["tiers"])
                        progress.update(bar, total=len(tiers))
                    elif message.get("unusable"):
                        raise ConfigError(message["text"])
                    elif message["kind"] == AGAIN:
                        console.print(f"{stage}: {message['text']}; it goes on without that", markup=False)
                        goes_on, job = True, {**job, "lacked": job.get("lacked", {}) | message["lacked"]}
                    elif message["kind"] in {"built", "planned", "failed"} and set(done) & set(waiting):
                        progress.advance(bar)
                        waiting = [tier for tier in waiting if tier not in done]
                        yield {"stage": stage, **message}
                reason = process.death_reason() or "its process printed nothing"
                goes_on, job = goes_on or process.died_capturing(), {**job, "force": False}
                if waiting and not goes_on:
                    yield {"stage": stage, "kind": "failed", "tier": ", ".join(waiting), "text": reason}
            finally:
                process.close()


def _print(results: list[dict[str, Any]], shown: "Console") -> None:
    rows: list[list[str]] = []
    notes: list[str] = []
    for result in results:
        name = f"{result['stage']} {result['tier']}"
        if result["kind"] == "planned":
            notes.append(f"{name}: {result['text']}")
        elif result["kind"] == "failed":
            text = f"torchperf: {name}: {result['text']}\n{result.get('detail', '')}"
            sys.stderr.write(text.rstrip() + "\n")
        else:
            rows.append(_row(result))
            notes += [f"{name}: {note}" for note in _notes(result)]
    if rows:
        shown.print(console_table(_COLUMNS, rows))
    for note in notes:
        shell.say(shown, note)


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    manifest = result["manifest"] or {}
    if result.get("choice"):
        yield result["choice"]
    if int8 := manifest.get("int8"):
        layers = (
            f"{n['int8']} of {n['there']} {kind} ({n['quantised']} quantised)" for kind, n in int8.items()
        )
        yield f"in int8 {', '.join(layers)}"
    if variants := manifest.get("variants_ms"):
        first, *others = (f"{variant} {p50_ms:.2f} ms" for variant, p50_ms in variants.items())
        yield f"kept {first}" + (f"; {', '.join(others)}" if others else "")


def _row(result: dict[str, Any]) -> list[str]:
    manifest = result["manifest"]
    if manifest is None:  # the fastest takes no package
        return [result["stage"], result["tier"], result["engine"], *[""] * (len(_COLUMNS) - 3)]
    timing = list(manifest["timings"].values())[-1]  # the example's shape
    ratio = timing["eager_p50_ms"] / timing["p50_ms"]
    return [
        result["stage"],
        result["tier"],
        manifest["identity"]["options"]["engine"],
        Path(result["package"]).stem[:12],
        f"{manifest['package_bytes'] / _MIB:.1f}",
        f"{manifest['compile_s']:.1f} s" + ("" if result["new"] else ", earlier"),
        f"{timing['p50_ms']:.2f} / {timing['p99_ms']:.2f}",
        f"{timing['eager_p50_ms']:.2f} / {timing['eager_p99_ms']:.2f}",
        f"{ratio:.2f}x" + (" no gain" if ratio < 1.0 else ""),
        _parity(manifest["parity"]),
    ]


def _parity(parity: dict[str, float | None]) -> str:
    score, loss = parity.get("score"), parity.get("loss")  # earlier versions wrote none
    by = "" if score is None else f"by score {score:.3f}; "
    return (by if loss is None else f"loses {loss:.4f}; ") + f"L2 {parity['relative_l2']:.1e}"


def cache(
    remove: Annotated[
        str | None, Option(metavar="KEY|all", help="Remove the packages whose key begins so, or all.")
    ] = None,
    cache_dir: Annotated[str, Option(help="The folder; default: where the node keeps them.")] = "",
) -> None:
    """List the compiled packages on this machine, or remove them.

    A package whose files are damaged is named with what is wrong with it; the
    node builds it anew. With `all`, what compilers keep there goes, too, and
    what was found out: which engines are fastest, which models no CUDA graph takes.

    Example: torchperf cache --remove 3f9a
    """
    from torchperf_ros.workers.incident_folder import folder_size_bytes
    from torchperf_ros.workers.package_cache import clear_compiler_cache, open_cache

    shown, packages = shell.console(_TABLE_WIDTH), open_cache(cache_dir, 0)
    try:
        entries = packages.entries()
    except OSError as error:
        shell.fail(f"folder {packages.folder} cannot be read: {error.strerror}")
    if remove is not None:
        chosen = [one for one in entries if remove == "all" or one.path.stem.startswith(remove or "\0")]
        if not chosen and remove != "all":
            shell.fail(f"no package in {packages.folder} has a key that begins with {remove!r}")
        for entry in chosen:
            packages.remove(entry.path)
        freed = sum(entry.size_bytes for entry in chosen) + packages.remove_abandoned()
        kept = 0
        if remove == "all":
            packages.forget_findings()
            kept = clear_compiler_cache(cache_dir)
        more = f", and {kept / _MIB:.1f} MiB that torch's compilers kept there" if kept else ""
        what = f"removed {len(chosen)} packages, {freed / _MIB:.1f} MiB, from {packages.folder}"
        shell.say(shown, what + more)
        return
    rows = [_cached(entry) for entry in entries if entry.manifest is not None]
    for entry in entries:
        if entry.manifest is None:
            shell.say(shown, f"{entry.path.stem[:12]}: {entry.problem}", "red")
    for key, why in packages.uncapturable().items():
        shell.say(shown, f"{key[:12]}: runs without a CUDA graph: {why}", "yellow")
    if rows:
        heads = ("key", "adapter", "tier", "how", "device", "torch", ">MiB", ">p50 ms", ">eager", "built")
        shown.print(console_table(heads, rows))
    size_bytes = sum(entry.size_bytes for entry in entries)
    others_mib = (folder_size_bytes(packages.folder) - size_bytes) / _MIB
    shell.say(
        shown,
        f"{len(entries)} packages, {size_bytes / _MIB:.1f} MiB, in {packages.folder};"
        f" {others_mib:.1f} MiB that compilers, tuning and interrupted builds left",
    )


def _cached(entry: "CachedPackage") -> list[str]:
    assert entry.manifest is not None
    manifest, identity = entry.manifest, entry.manifest.identity
    timing, options = list(manifest.timings.values())[-1], identity.options
    how = [str(options.get("engine", "")), str(options.get("precision", ""))]
    how += [name for name, value in options.items() if value is True]
    return [
        entry.path.stem[:12],
        manifest.adapter.rpartition(":")[2],
        manifest.tier,
        " ".join(how),
        f"{identity.device} {identity.capability}",
        identity.torch,
        f"{entry.size_bytes / _MIB:.1f}",
        f"{timing['p50_ms']:.2f}",
        f"{timing['eager_p50_ms']:.2f}",
        manifest.built[:16].replace("T", " "),
    ]


def evidence(
    clear: Annotated[bool, Option("--clear", help="Remove every incident.")] = False,
    evidence_dir: Annotated[str, Option(help="The folder; default: where the node keeps them.")] = "",
) -> None:
    """List the incidents that nodes have written on this machine, or remove them.

    Records, which are bounded by record_mib, and the latch of the emergency lane stay.

    Example: torchperf evidence --clear
    """
    from torchperf_ros.workers.incident_folder import folder_size_bytes, open_incidents

    shown, incidents = shell.console(), open_incidents(evidence_dir, 1)
    try:
        if clear:
            count, size_bytes = incidents.clear()
            size = f"{size_bytes / _MIB:.1f} MiB"
            shell.say(shown, f"removed {count} incidents, {size}, from {incidents.root}")
            return
        sizes_mib = {path.name: folder_size_bytes(path) / _MIB for path in incidents.incidents()}
    except OSError as error:
        shell.fail(f"evidence in {incidents.root}: {error.strerror}: {error.filename}")
    for name, mib in sizes_mib.items():
        shell.say(shown, f"{mib:8.1f} MiB  {name}")
    size = f"{sum(sizes_mib.values()):.1f} MiB"
    shell.say(shown, f"{len(sizes_mib)} incidents, {size}, in {incidents.root}")


_MOST_JUDGED = 100_000
_USUAL_TIERS = "those of full, medium, fast that it has"
_TIERS = (
    f"Of the adapter, most accurate first: that one is tuned, others are checked; default: {_USUAL_TIERS}."
)
_MARKS = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}


def check(
    adapter: Annotated[str, Argument(help="module:Class, for example my_robot.segmenter:Segmenter.")],
    tiers: Annotated[
        str, Option(help=f"Names of its tiers, most accurate first; default: {_USUAL_TIERS}.")
    ] = "",
    options: shell.AdapterOptions = "{}",
    log: Annotated[
        shell.File, Option(exists=True, help="Take the frame from this log; default: a made one.")
    ] = None,
    device: shell.Device = "auto",
) -> None:
    """Check that an adapter works: load it, build it twice, run a frame, check the message.

    The first command for a new adapter: it takes seconds, and needs no node and
    no ROS. It finds weights that differ at every build, tiers that take
    different inputs, NaN, and output messages whose sizes contradict each other.

    Example: torchperf check my_robot.segmenter:Segmenter --log drive.mcap

    Exit status: 0 if all is well, 1 if something is not, 2 if the input cannot be used.
    """
    look_here_after_python(add=True)
    parsed, shown = shell.json_object(options), shell.console()
    with shell.console(stderr=True).status("importing torch"):
        from torchperf_ros.tools.check import AdapterCheck
    checked = AdapterCheck(adapter, parsed, shell.words(tiers), device, log)
    for found in checked.run():
        took = "" if math.isnan(found.took_ms) else f" ({found.took_ms:.1f} ms)"
        shown.print(f"{_MARKS[found.ok]}  [bold]{found.step}[/]{took}", end="")
        shell.say(shown, f"  {found.text}" if found.text else "")
    good = "all is well, as far as it goes: the frame was refused" if checked.refused else "all is well"
    shown.print("something is wrong: see the lines with `no`" if checked.failed else good, style="bold")
    if not checked.failed:
        shell.say(
            shown, f"next: torchperf tune {adapter} -o tuned.yaml finds how it runs best on this machine"
        )
    raise typer.Exit(checked.failed)


def inspect(
    target: Annotated[
        str, Argument(help="module:Adapter, module:callable or file.py:callable (module or function).")
    ],
    inputs: Annotated[
        shell.Texts,
        Option("--input", help="Sizes of its arguments, as '1x3x224x224:float32 8'; repeatable."),
    ] = None,
    tier: Annotated[str, Option(help="Which tier of an adapter.")] = "full",
    options: shell.AdapterOptions = "{}",
    device: shell.Device = "auto",
    max_breaks: Annotated[
        int | None, Option(min=0, help="A gate for CI: exit status 1 where there are more.")
    ] = None,
    json_file: shell.JsonFile = None,
) -> None:
    """Show why torch.compile splits a model.

    Each graph break, its line, its reason, and what to write instead.

    Over several inputs also what is compiled again and why: branches on sizes,
    loops that unroll. An adapter brings its inputs, and others from its
    dynamic dimensions; any other callable gets random ones from each --input.
    What a compiled model gains is measured by torchperf tune.

    Example: torchperf inspect my_robot/net.py:Net --input 1x3x224x224 --input 2x3x224x224 --max-breaks 0

    Exit status: 0 if all is well, 1 if there are more than --max-breaks or the
    compiled model raises, 2 if the input cannot be used.
    """
    shell.check_outputs({"--json": json_file})
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        shell.fail(f"--device {device!r} is none of auto, cpu, cuda, cuda:N")
    from torchperf_ros.workers.package_cache import use_compiler_cache

    adapter_options, shown = shell.json_object(options), shell.console()
    with shell.console(stderr=True).status("importing torch") as status:
        use_compiler_cache("", _MIB << 10)  # torch's own folder may be another user's
        from torchperf_ros.engines.device import Device as Place
        from torchperf_ros.engines.device import choose_device
        from torchperf_ros.tools.inspection import Inspection, as_json, load_model, show

        place = Place(choose_device(device), threads=0).device  # with as many CPU threads as a worker has
        status.update(f"loading {target}")
        model = load_model(target, tier, adapter_options, inputs or [], place)
        inspection = Inspection(model, place)
        inspection.run(status.update)
    show(inspection, shown, max_breaks)
    if json_file is not None:
        shell.write_output(json_file, json.dumps(as_json(inspection, max_breaks), indent=2))
    raise typer.Exit(inspection.exit_status(max_breaks))


def tune(  # noqa: PLR0913, PLR0917 - one for each option
    adapter: Annotated[
        shell.Text, Argument(help="module:Class of the adapter; with --params also the stage's name.")
    ] = None,
    params: Annotated[
        shell.File, Option(help="A node's parameter file: its names are kept, and its values.")
    ] = None,
    budget_ms: Annotated[
        float | None, Option(help="The stage's, which p99 has to fit; default: the node's.")
    ] = None,
    max_loss: Annotated[
        float, Option(help="Of accuracy against eager fp32, of adapters with a task.")
    ] = MOST_LOSS,
    judged: Annotated[
        int, Option(min=0, max=_MOST_JUDGED, help="Held-out examples for accuracy; 0: none.")
    ] = 100,
    tiers: Annotated[shell.Texts, Option("--tiers", "--tier", help=_TIERS)] = None,
    options: Annotated[shell.Text, Option(help="JSON object, handed to the adapter.")] = None,
    log: Annotated[
        shell.File, Option(help="A drive: int8_static is calibrated on its frames, all is compared.")
    ] = None,
    device: Annotated[shell.Text, Option(help="auto, cpu, cuda or cuda:N.")] = None,
    engines: Annotated[
        shell.Texts, Option("--engines", "--engine", help=f"Only these: {', '.join(ENGINES)}.")
    ] = None,
    minutes: Annotated[float, Option(help="For the whole search.")] = 10.0,
    seconds: Annotated[
        float,
        Option(help="Of measuring what may be the best, and as long eager; at most 2 % of --minutes."),
    ] = 3.0,
    output: Annotated[
        shell.Files,
        shell.outputs_option("Write the parameters (FILE.yaml), or every figure (FILE.json)."),
    ] = None,
    dry_run: shell.DryRun = False,
) -> None:
    """Find how your model runs best on this machine, and write it as the node's parameters.

    Searches engine, mode, precision, layout, threads, buckets and CUDA graphs
    for the smallest p99 within the limits: one option after the other from the
    best so far, cheap ones first: on CUDA graphs, on the CPU the libraries.
    Eager and graphs share a process until one fails in it; every compiled
    candidate has its own. Each is compared with eager fp32, and is timed in turns
    with it: briefly, and at length where that is near the best. What crashes or
    hangs is noted. Results are kept: the same command goes on where the last one
    ended.

    The first tier is tuned, with three quarters of the time. What is best there
    is then checked on the others, which may only differ in precision.

    With --log, frames of a drive go through the adapter's `preprocess`: ranges of
    int8_static come from every other of them, and every engine is compared with
    eager on the rest. Without, they come from `Adapter.score_inputs`; where that
    has none, int8_static is left out. What is not fp32 has to answer as eager
    does: by the adapter's score, else by the largest along dimension 1.

    An adapter with a training task is also judged by held-out examples of it:
    what is less accurate than eager fp32 is refused, and in the end tiers are
    proposed: which are worth keeping here, and which comes first.

    Examples: torchperf tune my_robot.segmenter:Segmenter --budget-ms 40 -o tuned.yaml
              torchperf tune segmentation --params robot.yaml --log drive.mcap -o tuned.yaml

    Exit status: 0 if something fits the limits, 1 if not, 2 if the input cannot be used, 130 after Ctrl-C.
    """
    numbers = {
        "--budget-ms": 1.0 if budget_ms is None else budget_ms,
        "--max-loss": max_loss,
        "--minutes": minutes,
        "--seconds": seconds,
    }
    for name, number in numbers.items():
        if not number > 0:
            shell.fail(f"{name} {number:g} is not allowed; it has to be a number above 0")
    files = shell.files_by_suffix(output, ".yaml", ".yml", ".json")
    only, names = shell.every_word(engines), shell.every_word(tiers)
    if unknown := [name for name in only if name not in ENGINES]:
        shell.fail(f"--engines {unknown[0]!r} is not allowed; it has to be one of {', '.join(ENGINES)}")
    from torchperf_ros.tools.tune.run import tune as search
    from torchperf_ros.tools.tune.search import TuneOptions, target_of_adapter, target_of_file
    from torchperf_ros.tools.tune.trial import Limits

    values = {"options": options, "budget_ms": budget_ms}
    if params is not None and options is None:
        target = target_of_file(params, adapter, values, device)
    elif adapter is not None and params is None:
        target = target_of_adapter(adapter, names, values, device or "auto")
    else:
        raise ConfigError(
            "give what to tune: either an adapter, module:Class, with --options, or --params FILE, with"
            " the stage's name, which holds the options itself"
        )
    limits = Limits(target.stage.budget_ms, max_loss)
    written = files.get(".yaml", files.get(".yml")), files.get(".json")
    chosen = TuneOptions(limits, only, seconds, minutes, dry_run, *written, judged, log)
    raise typer.Exit(search(target.with_tiers(names), chosen, shell.console(140)))
