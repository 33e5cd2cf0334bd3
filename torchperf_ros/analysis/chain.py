"""Launch-bound chains: so little arithmetic per operation that what one costs to start is nearly all there is."""

from collections.abc import Callable

import torch

Operation = Callable[[torch.Tensor], torch.Tensor]

LENGTHS = (1, 5, 10, 15, 20, 25, 30)
"""The lengths of the known curve."""

BATCH_SIZES = range(4, 14)
WIDTH = 16
_SEED = 0

OPERATIONS: tuple[tuple[str, Operation], ...] = (
    ("add", lambda x: x + 1.0),
    ("sin", torch.sin),
    ("mul", lambda x: x * 0.5),
    ("cos", torch.cos),
    ("add", lambda x: x + 0.25),
    ("relu", torch.relu),
    ("sub", lambda x: x - 0.5),
    ("exp", torch.exp),
    ("sigmoid", torch.sigmoid),
)
"""Elementwise and bounded, so that a chain of any length stays finite; a longer chain begins again."""


class _Chain(torch.nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(self._length):
            x = OPERATIONS[index % len(OPERATIONS)][1](x)
        return x.sum()


def make_chain(length: int) -> torch.nn.Module:
    """`length` >= 1 operations and a sum: (batch, 16) -> scalar.

    Written out operation by operation, as a person would write a short one, so that eager does not pay for the loop.
    Each chain has code of its own: torch.compile keeps what it compiled by code, and looks through all of it at every
    call.
    """
    return torch.fx.symbolic_trace(_Chain(length)).eval()


def chain_inputs(device: torch.device) -> list[torch.Tensor]:
    """One input of each batch size, 4 to 13: the workload is a pass over all of them."""
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(size, WIDTH, generator=generator).to(device) for size in BATCH_SIZES]
