"""One run of `torchperf bench model`: progress, lines of JSON or tables, advice, files."""

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchperf_ros.analysis.bench_advice import advise
from torchperf_ros.analysis.bench_case import Case, Result
from torchperf_ros.analysis.bench_report import bench_csv, bench_json, bench_table, start_table
from torchperf_ros.analysis.machine import describe_machine, machine_line
from torchperf_ros.analysis.model_bench import ModelBench
from torchperf_ros.worker.device import choose_device


def run_model_bench(bench: ModelBench, folder: Path | None, console: Console, *, as_json: bool) -> bool:
    """Measure every case, show and write; whether every one has figures.

    Args:
        bench: what to measure.
        folder: for model.csv and model.json; None: nothing is written.
        console: for tables.
        as_json: lines of JSON on standard output, one for each case as it comes, in place of the tables.

    Raises:
        AdapterError: the adapter or the device cannot be used at all.
        OSError: a file cannot be written.
    """
    results: list[Result] = []
    machine = describe_machine(choose_device(bench.device), 0)  # before it is loaded by this
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(bench.cases))

        def on_step(case: Case, text: str) -> None:
            progress.update(task, description=f"{case}: {text}", completed=len(results))

        for result in bench.run(on_step):
            results.append(result)
            if as_json:
                print(json.dumps(result.as_dict()), flush=True)  # one line, whatever the width of a terminal
    advice = advise(results)
    threads = next((result.figures.threads for result in results if result.figures is not None), 0)
    machine["threads"] = threads
    if as_json:
        print(json.dumps({"machine": machine, "advice": advice}))
    else:
        console.print(f"{bench.adapter}\n{machine_line(machine)}", style="grey62", highlight=False, markup=False)
        console.print(bench_table(results))
        console.print(start_table(results))
        for text in advice:
            console.print(f"- {text}", highlight=False, markup=False)
    if folder is not None:
        subject = {"machine": machine, "adapter": bench.adapter, "options": dict(bench.options)}
        (folder / "model.csv").write_text(bench_csv(results), encoding="utf-8")
        (folder / "model.json").write_text(bench_json(results, advice, subject), encoding="utf-8")
        if not as_json:
            console.print(f"{folder}: model.csv, model.json", highlight=False, markup=False)
    return all(result.figures is not None for result in results)
