"""How an output's size follows from an input's: found by asking for a few sizes, then exact for the whole range."""

from collections.abc import Callable
from dataclasses import dataclass

_CHECKS = 5


@dataclass(frozen=True)
class SizeRule:
    """`size -> base + multiple * ((size - first) // stride)`, for sizes within the range that it was learned on.

    Covers what layers do: the same size (pointwise), a constant (pooled), `(size + offset) // stride`
    (convolutions, pooling), and multiples (flattening, upsampling).

    Attributes:
        base: output size at `first`.
        multiple: by how much the output grows at once; 0 where it is constant.
        first: a size at which the output grows, or the lowest.
        stride: how far the next such size is.
    """

    base: int
    multiple: int
    first: int
    stride: int

    def __call__(self, size: int) -> int:
        """The output's size for an input's."""
        return self.base + self.multiple * ((size - self.first) // self.stride)

    @property
    def constant(self) -> bool:
        """Whether the output does not follow the input."""
        return self.multiple == 0

    @property
    def proportional(self) -> bool:
        """Whether the output of a whole is as long as the outputs of its parts together."""
        return self.stride == 1 and self.base == self.multiple * self.first

    @classmethod
    def learn(cls, size_of: Callable[[int], int], low: int, high: int) -> "SizeRule | None":
        """Find the rule from a few sizes between `low` and `high`.

        Args:
            size_of: the output's size for an input's; asked about twice log2(stride) times, and a few times to check.
            low: smallest input size.
            high: largest input size.

        Returns:
            None where no rule fits what was asked; sizes in between that were not asked are taken to follow.
        """
        smallest, largest = size_of(low), size_of(high)
        first = _next_growth(size_of, low, high)
        if first is None:
            rule = cls(smallest, 0, low, 1)
        else:
            base = size_of(first)
            second = _next_growth(size_of, first, high)
            stride = high - low + 1 if second is None else second - first
            if base < smallest or first - low > stride:
                return None
            rule = cls(base, base - smallest, first, stride)
        # spread by the golden ratio, so that no period of the sizes is hit only
        sizes = {low + round((high - low) * (0.618034 * n % 1.0)) for n in range(1, _CHECKS + 1)}
        fits = rule(low) == smallest and rule(high) == largest and all(rule(size) == size_of(size) for size in sizes)
        return rule if fits else None


def _next_growth(size_of: Callable[[int], int], start: int, high: int) -> int | None:
    """The first size above `start` with another output size; None: there is none up to `high`."""
    at_start, below, step = size_of(start), start, 1
    while size_of(above := min(start + step, high)) == at_start:
        if above == high:
            return None
        below, step = above, 2 * step
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if size_of(middle) == at_start else (below, middle)
    return above
