"""A budget that follows the situation: shorter at speed, and where a collision is near."""

from torchperf_ros.config.config import StageConfig


def situation_budget_ms(
    config: StageConfig, budget_ms: float, speed: float | None, ttc_s: float | None, least_ms: float
) -> float:
    """The budget of a frame, between `budget_least_ms` and the scene's.

    It falls evenly with the speed, from the scene's at rest to `budget_least_ms` at `budget_fast_speed`, and with the
    time to collision from `budget_near_s` down to 0; the shorter one counts. What is unknown shortens nothing.

    Args:
        config: the stage's parameters.
        budget_ms: the scene's.
        speed: in m/s, None where it is unknown.
        ttc_s: time to collision, None where it is unknown or there is none.
        least_ms: what the cheapest tier takes, with the time to publish: no budget that follows is below.
    """
    shortest_ms = config.budget_least_ms
    if not 0.0 < shortest_ms < budget_ms:
        return budget_ms
    room = 1.0 if speed is None else 1.0 - speed / config.budget_fast_speed
    if ttc_s is not None:
        room = min(room, ttc_s / config.budget_near_s)
    wanted_ms = shortest_ms + (budget_ms - shortest_ms) * min(max(room, 0.0), 1.0)
    return min(budget_ms, max(wanted_ms, least_ms))
