"""What a stage does about the memory that is in use."""

from torchperf_ros.supervise.stage_actor import StageActor


def limit_memory(stage: StageActor, used_share: float, share: float) -> None:
    """Take a sample of the memory in use: above `share` of the limit, lower tiers run and nothing is compiled.

    Args:
        stage: the stage.
        used_share: memory in use over its limit, NaN where unknown.
        share: the parameter `memory_share`.
    """
    guard, was_tight = stage.memory, stage.memory.tight
    guard.update(used_share, share, len(stage.config.tiers))
    stage.crew.succession.may_compile = not guard.tight
    stage.ladder.left_out = guard.left_out
    if guard.tight and not was_tight:
        stage.workers.worker_told(
            f"memory is short: {used_share:.0%} of the limit is in use, memory_share is {share:.0%};"
            " lower tiers run, and nothing is compiled"
        )
