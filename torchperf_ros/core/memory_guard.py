"""What follows when memory runs short: lower tiers, one at a time, before the device says no."""

_RELAX = 0.9  # below this part of the share there is room again


class MemoryGuard:
    """Decides how many of the most accurate tiers are left out for now.

    Attributes:
        left_out: tiers that are left out, 0 while there is room.
        tight: whether memory is short: then nothing is compiled either.
    """

    def __init__(self) -> None:
        """Start with room."""
        self.left_out = 0
        self.tight = False

    def update(self, used_share: float, share: float, tiers: int) -> None:
        """Take a sample, about once a second: one tier fewer while short, one more while there is room again.

        Args:
            used_share: memory in use over its limit, NaN where unknown.
            share: from which it counts as short, 0 to 1.
            tiers: how many the stage has; the cheapest is never left out.
        """
        if used_share > share:
            self.tight = True
            self.left_out = min(self.left_out + 1, tiers - 1)
        elif used_share < _RELAX * share:
            self.tight = False
            self.left_out = max(self.left_out - 1, 0)
