"""One run of `torchperf train`.

Trains tiers beside each other, writes weights, model cards and a page of curves.
"""

import hashlib
import json
import math
import multiprocessing
import os
import queue
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

from torchperf_ros import __version__
from torchperf_ros.api.adapter import HELD_OUT, Task, open_adapter
from torchperf_ros.api.errors import ConfigError, TorchperfError, one_line
from torchperf_ros.engines.device import choose_device
from torchperf_ros.observe.telemetry.machine import machine_now
from torchperf_ros.train.labelled_log import LabelledLog
from torchperf_ros.train.tier_training import (
    Techniques,
    TierPlan,
    TierResult,
    TrainingFailed,
    network_of,
    train,
    trained_weights,
)
from torchperf_ros.workers.process_setup import die_with_parent

# Whose `training_task` trains which reference model, in the order in which that is done.
ADAPTERS: Final = {
    "detector": "torchperf_ros.models.camera:CameraAdapter",
    "planner": "torchperf_ros.models.planner:PlannerAdapter",
    "lidar": "torchperf_ros.models.lidar:LidarAdapter",
}
# Without defaults in `Task`: a task need not derive from it.
_PARTS_OF_A_TASK: Final = (
    "name",
    "tiers",
    "steps",
    "batch_size",
    "rate",
    "judged",
    "gradient",
    "network",
    "batch",
    "loss",
    "judge",
    "card",
)
PAGE_FILE: Final = "training.html"
_WAIT_S: Final = 0.5
_HEIGHT: Final = 340


def plans_of(
    means: Techniques,
    models: Sequence[str],
    tiers: Sequence[str],
    share: float,
    seed: int,
    device: str,
    judged: int | None,
    folder: Path,
) -> list[TierPlan]:
    """What is to be trained of each tier of each model.

    Args:
        means: what is learned from, and how; its `adapter` goes before `models`.
        models: of `ADAPTERS`; none: all.
        tiers: names; none: all.
        share: of the default steps.
        seed: of examples and first weights.
        device: cpu, cuda, or auto.
        judged: examples that the final scores are of; None: the task's default.
        folder: where everything is written.

    Raises:
        ConfigError: there is no such model, tier or device, a batch cannot be cut into so many parts, or
            weights to start from or to learn from cannot be used.
    """
    _of(models, ADAPTERS, "model")
    if means.adapter and models:
        raise ConfigError(f"models {', '.join(models)}: they have no effect beside adapter {means.adapter}")
    found, plans = choose_device(device), []
    names = dict.fromkeys(models) or ADAPTERS
    for adapter in [means.adapter] if means.adapter else [ADAPTERS[name] for name in names]:
        task = task_of(adapter, means.data)
        _of(tiers, task.tiers, f"{task.name}: tier")
        if task.batch_size % means.accumulate:
            raise ConfigError(
                f"accumulate is {means.accumulate}; it has to divide {task.name}'s batch of {task.batch_size}"
            )
        for tier in [tier for tier in task.tiers if not tiers or tier in tiers]:
            plan = TierPlan(
                task.name,
                tier,
                max(1, round(share * task.steps[tier])),
                seed,
                str(found),
                judged or task.judged,
                folder / f"{task.name}-{tier}.checkpoint",
                **{**vars(means), "adapter": adapter},
            )
            try:  # now, before hours go into the tiers that come first
                if means.start is not None or means.teacher is not None:
                    network_of(task, plan)
            except ConfigError as error:
                raise ConfigError(f"{task.name}, tier {tier}: {error}") from error
            plans.append(plan)
    return plans


def task_of(adapter: str, data: tuple[Path, str, Path] | None) -> Task:
    """An adapter's task.

    Raises:
        ConfigError: the adapter has none or no whole one, or log and labels cannot be used.
        AdapterError: there is no such adapter.
    """
    try:
        task: Task | None = open_adapter(adapter, {}, torch.device("cpu")).training_task(
            None if data is None else LabelledLog(*data)
        )
    except TorchperfError:
        raise
    except Exception as error:  # the user's code runs here
        raise ConfigError(f"adapter {adapter}: {one_line(error)}") from error
    if task is None:
        raise ConfigError(f"adapter {adapter}: it has no training_task; docs/training.md has one")
    if missing := [name for name in _PARTS_OF_A_TASK if not hasattr(task, name)]:
        raise ConfigError(
            f"adapter {adapter}: training_task gives {type(task).__name__}, which has no "
            f"{', '.join(missing)}; docs/training.md has a whole one"
        )
    return task


def _of(names: Sequence[str], known: Mapping[str, Any], what: str) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{what} {unknown[0]!r} does not exist; allowed: {', '.join(known)}")


def train_all(
    plans: Sequence[TierPlan], advance: Callable[[TierPlan, int], None]
) -> dict[TierPlan, TierResult]:
    """Train every plan in a process of its own, as many at once as the process has cores; on CUDA one.

    `advance` hears which step of a plan is done.

    Raises:
        TrainingFailed: a process ended before it was done.
        ConfigError: nothing can be written to the folder, or a log's labels cannot be used.
    """
    folder = plans[0].checkpoint.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(
            dir=folder
        ).close()  # root may write by the permissions, not on a read-only disk
    except OSError as error:
        raise ConfigError(f"output {folder}: {error.strerror}; name a folder of yours") from error
    together = len(os.sched_getaffinity(0)) if plans[0].device == "cpu" else 1
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    waiting, results = list(enumerate(plans)), dict[int, TierResult]()
    running: dict[int, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < together:
                number, plan = waiting.pop(0)
                running[number] = context.Process(target=train_tier, args=(number, plan, reports))
                # A terminal's Ctrl-C is for the command, which ends the process: that inherits the mask.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                running[number].start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            try:
                number, step, result = reports.get(timeout=_WAIT_S)
            except queue.Empty:
                for number, process in running.items():
                    if process.exitcode is not None and process.exitcode != 0:
                        tier = f"{plans[number].model}, tier {plans[number].tier}"
                        raise TrainingFailed(
                            f"{tier}: its process ended with {process.exitcode}; the same command goes on"
                        ) from None
                continue
            if isinstance(result, TorchperfError):
                raise result
            if result is None:
                advance(plans[number], step)
            else:
                results[number] = result
                running.pop(number).join()
    finally:
        for process in running.values():
            process.kill()
    return {plan: results[number] for number, plan in enumerate(plans)}


def train_tier(number: int, plan: TierPlan, reports: Any) -> None:  # noqa: ANN401 - a queue of multiprocessing
    """A tier's process.

    No daemon, for its loaders are processes, too, so it ends with the command by itself.
    """
    die_with_parent()
    try:
        task = task_of(plan.adapter, plan.data)
        result: Any = train(task, plan, lambda step: reports.put((number, step, None)))
    except Exception as error:  # the user's task runs here: the command names its line
        result = (
            error
            if isinstance(error, TorchperfError)
            else TrainingFailed(f"{plan.model}, tier {plan.tier}: {one_line(error)}")
        )
    reports.put((number, plan.steps, result))


def write(results: Mapping[TierPlan, TierResult]) -> None:
    """Weights, model card and figures of each model, and the page, into the folder of the checkpoints."""
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(plan.model for plan in results):
        own = {plan: result for plan, result in results.items() if plan.model == name}
        first = next(iter(own))
        weights = {
            f"{plan.tier}.{key}": _compact(value)
            for plan in own
            for key, value in trained_weights(plan).items()
        }
        path = first.checkpoint.with_name(f"{name}.safetensors")
        widths = json.dumps({plan.tier: result.width for plan, result in own.items()})
        content = save(weights, {"widths": widths})  # one entry: of several the order varies, and the hash
        path.write_bytes(content)
        figures[name] = {
            "seed": first.seed,
            "held_out": HELD_OUT,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "machine": machine_now(first.device),
            "tiers": {
                plan.tier: {"steps": plan.steps, "judged": plan.judged, **asdict(one)}
                for plan, one in own.items()
            },
        }
        plain = json.loads(json.dumps(figures[name]), parse_constant=lambda _: None)  # NaN is null in JSON
        path.with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        task = task_of(first.adapter, first.data)
        if write_examples := getattr(task, "write_examples", None):  # a task need not derive from `Task`
            write_examples(path)
        path.with_suffix(".md").write_text(_card(task, figures[name]), encoding="utf-8")
    path.with_name(PAGE_FILE).write_text(training_page(figures), encoding="utf-8")


# In fp16 where that has room for every number; the counter of a normalisation, for one, stays as it is.
def _compact(value: torch.Tensor) -> torch.Tensor:
    half = value.to(torch.float16)
    fits = value.is_floating_point() and bool(half.isfinite().all())
    # A copy: the file takes no two that share memory, as tied weights do.
    return (half if fits else value).clone(memory_format=torch.contiguous_format)


def _card(task: Task, figures: Mapping[str, Any]) -> str:
    """The model card (Mitchell et al., "Model Cards for Model Reporting", 2019), in Markdown."""
    tiers, machine = figures["tiers"], figures["machine"]
    columns = list(next(iter(tiers.values()))["score"])
    rows = [
        [
            tier,
            str(one["width"]),
            f"{one['steps'] * task.batch_size:,}",
            f"{one['seconds']:.0f}",
            f"{one['cpu_s']:.0f}",
            *(f"{one['score'][column]:.3f}" for column in columns),
        ]
        for tier, one in tiers.items()
    ]
    head = ["tier", "width", "examples", "seconds", "CPU s", *columns]
    table = "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
    return (
        f"{task.card(next(iter(tiers.values()))['judged'])}\n{table}\n\nTrained by `torchperf train --seed"
        f" {figures['seed']}` ({machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}), each"
        f" tier on one thread. Weights: fp16, {figures['bytes'] / 1e6:.2f} MB,"
        f" SHA-256\n`{figures['sha256']}`.\n"
    )


def training_page(figures: Mapping[str, Any]) -> str:
    """Loss and score of each model over its steps, a line for each tier, and the table of its card."""
    import plotly.graph_objects as go

    from torchperf_ros.observe.runs import report_pictures as draw
    from torchperf_ros.observe.runs.report import Page, number_cell, table

    page = Page()
    for name, own in figures.items():
        columns = list(next(iter(own["tiers"].values()))["score"])
        pictures = []
        for place, title in ((1, "Loss, running mean"), (2, f"{columns[0]} on held-out examples")):
            figure = go.Figure()
            for tier, one in own["tiers"].items():
                steps = [point[0] for point in one["curve"]]
                values = [point[place] if math.isfinite(point[place]) else None for point in one["curve"]]
                figure.add_scatter(x=steps, y=values, mode="lines+markers", name=tier)
            pictures.append((title, draw.laid_out(figure, _HEIGHT, "steps", "", showlegend=True)))
        rows = [
            [
                tier,
                *(number_cell(f"{value:.3f}") for value in one["score"].values()),
                number_cell(f"{one['seconds']:,.0f}"),
            ]
            for tier, one in own["tiers"].items()
        ]
        page.section(name, [page.plots(*pictures), table(("tier", *columns, "seconds"), rows)])
    return page.render(
        "Training", "Scores are of examples that were not trained with.", f"torchperf {__version__}"
    )
