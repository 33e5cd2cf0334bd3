"""How a message becomes a frame: its age, its deadline, and whether it can be used at all."""

from torchperf_ros.core.clock import NS_PER_MS
from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.frame import Frame, Origin, stamp_age_ms, usable_age_ms


def admit(
    config: StageConfig,
    data: bytes | None,
    stamp_ns: int,
    *,
    received_ns: int,
    ros_now_ns: int,
    upstream: Frame | None = None,
    refusal: str = "",
) -> Frame:
    """Make the frame of a trigger message; its number comes later.

    The budget counts from the receipt, or from the stamp if so configured and the stamp is usable. Behind another
    stage it counts from when the frame was due: received, or the deadline there if that was earlier, so that end to end
    no more than the sum of the budgets is taken.

    Args:
        config: the stage's configuration.
        data: CDR bytes; None where the stage before has nothing to hand over.
        stamp_ns: `header.stamp`, 0 if none.
        received_ns: monotonic receipt.
        ros_now_ns: ROS time of the receipt.
        upstream: the frame of the stage before that `data` is the output of.
        refusal: why the message cannot be used, if that is known already.
    """
    age_ms = stamp_age_ms(stamp_ns, ros_now_ns)
    due_ns = received_ns if upstream is None else min(received_ns, upstream.deadline_ns)
    budget_ms = config.budget_ms
    if config.budget_from == "stamp":
        budget_ms -= usable_age_ms(age_ms if upstream is None else upstream.age_at_ms(received_ns))
    if data is not None and len(data) > config.max_frame_bytes:
        refusal = f"message of {len(data)} bytes; max_frame_bytes is {config.max_frame_bytes}"
    origin = Origin(received_ns, age_ms) if upstream is None else upstream.origin
    deadline_ns = due_ns + round(budget_ms * NS_PER_MS)
    return Frame(-1, data, stamp_ns, age_ms, received_ns, deadline_ns, origin, refusal)
