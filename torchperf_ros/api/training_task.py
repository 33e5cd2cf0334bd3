"""What `torchperf train` needs to know of a model.

Its tiers, its examples, its loss, and how it is judged.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchperf_ros.api.errors import ConfigError

# Seed of the examples by which a tier is judged; those of training have numbers.
HELD_OUT = "held out"


class Task(Protocol):
    """A model and what it learns from; made anew in each process that trains a tier.

    Those that derive from it have its defaults.

    Attributes:
        name: of the model, and of the files that are written.
        tiers: width of each tier's layers, best first.
        steps: of training, by default, of each tier.
        batch_size: examples per step.
        rate: highest learning rate of each tier.
        judged: examples that a final score is of, by default.
        gradient: the longest gradient that is applied as it is; longer ones are shortened to it.
        higher_is_better: whether that is so for the first figure of `judge`; not for a distance.
    """

    name: str
    tiers: Mapping[str, int]
    steps: Mapping[str, int]
    batch_size: int
    rate: Mapping[str, float]
    judged: int
    gradient: float
    higher_is_better: bool = True

    def network(self, tier: str, width: int | None = None) -> nn.Module:
        """An untrained network of a tier, on the CPU, in training mode.

        `width`: of its layers; only weights that `pruned` has made narrower ask for another one than the
        tier's.
        """

    def pruned(self, network: Any, share: float) -> tuple[nn.Module, int]:  # noqa: ANN401
        """The network without that share of its channels, those of the smallest weights; and its width.

        Raises:
            ConfigError: networks of this task cannot be pruned; so by default.
        """
        raise ConfigError(f"its networks cannot be pruned (a share of {share:g} was asked for)")

    def learn_from(self, teacher: Any) -> None:  # noqa: ANN401
        """Learn from the answers of a better network beside the labels (distillation); it is in eval mode.

        Raises:
            ConfigError: this task learns from no teacher; so by default.
        """
        raise ConfigError("it learns from no teacher")

    def batch(self, seed: int | str, number: int, count: int) -> Any:  # noqa: ANN401 - the task's own
        """So many examples, the same ones for the same seed and number, on the CPU."""

    def loss(self, network: nn.Module, batch: Any, device: torch.device) -> Tensor:  # noqa: ANN401
        """What is to become small, a scalar."""

    def judge(
        self, call: Callable[..., Any], seed: int | str, count: int, device: torch.device
    ) -> dict[str, float]:
        """Figures of so many examples by what a network or its engine gives for the inputs of one frame each.

        The first figure is drawn over the steps, and is what `torchperf tune` calls the accuracy.
        """

    def write_examples(self, weights: Path) -> None:
        """Write beside the weights what the adapter wants for its `score_inputs`. Default: nothing."""
        return

    def card(self, judged: int) -> str:
        """Markdown for the model card: what the model does, what it learned from, what its figures mean."""


def open_task(path: str, *log: Any) -> Task:  # noqa: ANN401 - a log of the task's own kind
    """Make the task `module:Class`, which lies in a room above the adapter that names it."""
    module, _, name = path.partition(":")
    task: Task = getattr(importlib.import_module(module), name)(*log)
    return task
