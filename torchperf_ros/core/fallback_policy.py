"""What is published when a frame's own result is not there: the first configured fallback that is available."""

from collections.abc import Sequence

from torchperf_ros.core.outcome import Fallback


def choose_fallback(
    order: Sequence[Fallback], *, backup: bool, last_age_ms: float | None, hold_last_ms: float, stop: bool
) -> Fallback:
    """The first fallback in `order` that can be published.

    Args:
        order: as configured.
        backup: the backup worker has a fresh result for this frame.
        last_age_ms: age of the last good output in ms, counted from the receipt of its frame; None if there is none.
        hold_last_ms: how old it may be.
        stop: a stop output can be made.
    """
    available = {
        Fallback.BACKUP: backup,
        Fallback.HOLD_LAST: last_age_ms is not None and last_age_ms <= hold_last_ms,
        Fallback.STOP: stop,
        Fallback.NONE: True,
    }
    return next((kind for kind in order if available[kind]), Fallback.NONE)
