"""What a stage's workers are told at their start, as JSON."""

from typing import Any

from torchperf_ros.core.config import NodeConfig, StageConfig


def worker_setup(stage: StageConfig, node: NodeConfig) -> dict[str, Any]:
    """The setup message of a stage; the crew adds whether the worker loads in the background and may compile."""
    return {
        "stage": stage.name,
        "adapter": stage.adapter,
        "options": stage.options,
        "tiers": list(stage.tiers),
        "build": [stage.build_options(tier).as_dict() for tier in range(len(stage.tiers))],
        "packages": list(stage.packages),
        "shapes": stage.shapes.as_dict(),
        "device": node.device,
        "threads": node.worker_threads,
        "cache_dir": node.cache_dir,
        "cache_mib": node.cache_mib,
        "compile_missing": node.compile_missing,
        "start_timeout_s": node.start_timeout_s,
        "evidence": {
            "evidence_dir": node.evidence_dir,
            "evidence_count": node.evidence_count,
            "evidence_mib": node.evidence_mib,
        },
    }
