"""Training of one tier, in a process of its own.

Seeded, resumed where it was, judged on examples that it never saw.
"""

import io
import itertools
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchperf_ros.api.adapter import HELD_OUT, Task
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.engines.model_transforms import why_slow
from torchperf_ros.models.networks import load_weights, width_in
from torchperf_ros.workers.package_manifest import file_sha256

_JUDGED_EVERY, _JUDGED_BRIEFLY = 250, 60  # steps; examples
_REPORTED_EVERY: Final = 10
_KEPT_EVERY_S: Final = 30.0  # what an ended run loses at most, unless a step takes longer
_WEIGHT_DECAY: Final = 1e-4
_WARM_SHARE: Final = 0.1
# of the usual rate, which would undo what trained weights know; pruned ones learn anew
_FINE_TUNED: Final = 0.2
_KEPT_WEIGHTS: Final = 0.995  # of the running mean, each step (Polyak and Juditsky, 1992)


class TrainingFailed(TorchperfError):
    """A tier could not be trained; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """What is learned from, and by which means.

    The defaults are those that the shipped weights were trained with.

    Attributes:
        start: weights to start from (fine-tuning), by name; None: from the beginning.
        teacher: weights of the task's best tier, whose answers are learned from, too; None: none.
        prune: share of the channels of `start` that are taken away before it is trained on.
        accumulate: gradients of so many parts of a batch are added, so that only one part lies in memory.
        loaders: processes that make batches ready ahead; 0: each is made when it is needed.
        data: log, topic and labels to train on; None: what the task draws.
        adapter: whose task it is, `module:Class`.
    """

    start: Path | None = None
    teacher: Path | None = None
    prune: float = 0.0
    accumulate: int = 1
    loaders: int = 0
    data: tuple[Path, str, Path] | None = None
    adapter: str = ""


@dataclass(frozen=True)
class TierPlan(Techniques):
    """What is to be trained.

    Attributes:
        model: name of the task.
        tier: its name.
        steps: of the task's batches each.
        seed: of the examples and of the first weights.
        device: where.
        judged: examples that the final score is of.
        checkpoint: file to go on from, written as it goes.
        bf16: whether layers compute in bfloat16, where torch's autocast says that they can: where the device
            has instructions for it.
        read: SHA-256 of the files that it begins with: weights to start from, the teacher's, and labels; ""
            for none.
    """

    model: str
    tier: str
    steps: int
    seed: int
    device: str
    judged: int
    checkpoint: Path
    bf16: bool = field(init=False)
    read: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Ask the device, and read what files hold now."""
        files = (self.start, self.teacher, self.data and self.data[2])
        object.__setattr__(
            self, "read", tuple(file_sha256(one) if one and one.is_file() else "" for one in files)
        )
        object.__setattr__(self, "bf16", not why_slow("bf16", torch.device(self.device)))

    def identity(self) -> list[Any]:
        data = "" if self.data is None else f"{self.data[0]} {self.data[1]}"
        return [
            self.model,
            self.adapter,
            self.tier,
            self.steps,
            self.seed,
            self.bf16,
            self.accumulate,
            data,
            *self.read,
            self.prune,
        ]


@dataclass
class TierResult:
    """What came of it.

    Attributes:
        width: of the network's layers, which pruning makes smaller.
        seconds, cpu_s: of training, over all runs of it; what other programs took of the machine is in the
        first only.
        score: see `Task.judge`; `judged`: examples that it is of.
        curve: step, loss (a running mean) and the score's first figure on a few held-out examples.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    width: int = 0
    score: dict[str, float] = field(default_factory=dict)
    judged: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


def train(task: Task, plan: TierPlan, report: Callable[[int], None]) -> TierResult:
    """Train until the last step, from the checkpoint on if it is of the same plan.

    The weights are in the checkpoint. `report` hears which step is done.

    Raises:
        TrainingFailed: the loss is no number, or the checkpoint cannot be read.
        ConfigError: the weights to start from are another network's.
    """
    torch.set_num_threads(1)
    device = torch.device(plan.device)
    net, width = network_of(task, plan)
    net = net.to(device)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(_KEPT_WEIGHTS)  # type: ignore[no-untyped-call]
    # It is judged as it will run: without dropout, and normalised by the running means that `net` has now.
    mean = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average).eval()
    rate = task.rate[plan.tier] * (_FINE_TUNED if plan.start is not None and not plan.prune else 1.0)
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=plan.steps, pct_start=_WARM_SHARE
    )
    parts: dict[str, Any] = {"net": net, "mean": mean, "optimizer": optimizer, "schedule": schedule}
    result, step, running = TierResult(), 0, float("nan")
    if (found := read_checkpoint(plan)) is not None:
        step, running, result = found["step"], found["running"], TierResult(**found["result"])
        for name, part in parts.items():
            part.load_state_dict(found[name])
    began, cpu_began = time.monotonic() - result.seconds, time.process_time() - result.cpu_s

    kept_s = time.monotonic()

    def keep() -> None:
        nonlocal kept_s
        kept_s = time.monotonic()
        result.seconds, result.cpu_s = time.monotonic() - began, time.process_time() - cpu_began
        states = {name: part.state_dict() for name, part in parts.items()}
        write_checkpoint(plan, {**states, "step": step, "running": running, "result": asdict(result)})

    def judge(count: int) -> None:
        with torch.inference_mode():
            result.score = task.judge(mean.module, HELD_OUT, count, device)
        earlier = [point for point in result.curve if point[0] < step]
        result.curve, result.judged = [*earlier, (step, running, next(iter(result.score.values())))], count
        keep()

    batches = iter(
        DataLoader(
            _Batches(task, plan, step),
            batch_size=None,
            num_workers=plan.loaders,
            pin_memory=device.type == "cuda",
            multiprocessing_context="spawn" if plan.loaders else None,
        )
    )
    while step < plan.steps:
        loss = _step(task, net, plan, batches)
        if not math.isfinite(loss):
            raise TrainingFailed(f"{plan.model}, tier {plan.tier}: the loss is {loss} at step {step}")
        nn.utils.clip_grad_norm_(net.parameters(), task.gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        mean.update_parameters(net)
        step += 1
        running = loss if step == 1 else 0.98 * running + 0.02 * loss
        if step % _REPORTED_EVERY == 0 or step == plan.steps:
            report(step)
        if step % _JUDGED_EVERY == 0 and step < plan.steps:
            judge(_JUDGED_BRIEFLY)
        elif time.monotonic() - kept_s >= _KEPT_EVERY_S:
            keep()
    result.width = width
    if result.judged != plan.judged or result.curve[-1][0] < step:
        judge(plan.judged)
    return result


def network_of(task: Task, plan: TierPlan) -> tuple[nn.Module, int]:
    """The network to train, and its width; the task gets its teacher.

    Raises:
        ConfigError: the weights to start from or those of the teacher cannot be used, or nothing can be
            pruned.
    """
    net, width = task.network(plan.tier), task.tiers[plan.tier]
    if plan.start is not None:
        net, width = _trained(task, plan.tier, plan.start)
    if plan.prune:
        before = width
        net, width = task.pruned(net, plan.prune)
        if width == before:
            raise ConfigError(f"prune {plan.prune:g}: takes none of the {width} channels of a layer away")
    if plan.teacher is not None:
        best, _ = _trained(task, next(iter(task.tiers)), plan.teacher)
        task.learn_from(best.requires_grad_(requires_grad=False).eval().to(plan.device))
    return net, width


def _trained(task: Task, tier: str, weights: Path) -> tuple[nn.Module, int]:
    """The network of a tier as a file has it, and its width, which is its own where it was pruned."""
    usual = task.tiers[tier]
    width = width_in(weights, tier, usual)
    net = task.network(tier) if width == usual else task.network(tier, width)
    load_weights(net, tier, weights)
    return net, width


class _Batches(Dataset[Any]):
    """What a training takes one after the other: parts of batches, by their numbers."""

    def __init__(self, task: Task, plan: TierPlan, first_step: int) -> None:
        self._task, self._seed, self._first = task, plan.seed, first_step * plan.accumulate
        self._count, self._parts = (
            task.batch_size // plan.accumulate,
            (plan.steps - first_step) * plan.accumulate,
        )

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, number: int) -> Any:  # noqa: ANN401 - the task's own
        return self._task.batch(self._seed, self._first + number, self._count)


def _step(task: Task, net: nn.Module, plan: TierPlan, batches: Iterator[Any]) -> float:
    device, total = torch.device(plan.device), 0.0
    for batch in itertools.islice(batches, plan.accumulate):
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.bf16):
            loss = task.loss(net, batch, device) / plan.accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def trained_weights(plan: TierPlan) -> dict[str, torch.Tensor]:
    """The weights of a tier that has been trained, as the network's `state_dict` has them."""
    found = read_checkpoint(plan)
    assert found is not None
    prefix = "module."
    return {
        name.removeprefix(prefix): value for name, value in found["mean"].items() if name.startswith(prefix)
    }


def read_checkpoint(plan: TierPlan) -> dict[str, Any] | None:
    """The checkpoint, None if there is none or it is of another plan.

    A `TrainingFailed` where it cannot be read.
    """
    if not plan.checkpoint.is_file():
        return None
    try:
        found: dict[str, Any] = torch.load(plan.checkpoint, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingFailed(
            f"{plan.checkpoint} cannot be read ({error}); remove it to begin anew"
        ) from error
    return found if found.get("plan") == plan.identity() else None


def write_checkpoint(plan: TierPlan, states: dict[str, Any]) -> None:
    """The checkpoint, whole or not at all; a `TrainingFailed` where there is no room for it."""
    temporary, content = plan.checkpoint.with_suffix(".part"), io.BytesIO()
    torch.save(
        {**states, "plan": plan.identity()}, content
    )  # into a file it does not say why it could not write
    try:
        temporary.write_bytes(content.getbuffer())
        os.replace(temporary, plan.checkpoint)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainingFailed(
            f"{plan.checkpoint} cannot be written: {error.strerror}; mend that, and the same command"
            " goes on"
        ) from error
