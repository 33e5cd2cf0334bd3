"""A comparison for machines: a JSON object."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from torchperf_ros.analysis.regress_compare import Comparison
from torchperf_ros.analysis.regress_run import RunFrames
from torchperf_ros.analysis.regress_text import headline
from torchperf_ros.analysis.regress_verdict import Finding, Rules

VERSION: Final = 1
_FACTS: Final = ("log", "model", "params_sha256", "pace", "seed", "machine", "commit", "complete")


def write_json(comparison: Comparison, status: int, rules: Rules, path: Path) -> None:
    """Write everything that the verdict rests on.

    Args:
        comparison: what to write.
        status: the exit status.
        rules: how verdicts were reached.
        path: the file to write.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "v": VERSION, "kind": "regress", "status": status, "verdict": headline(comparison),
        "notes": list(comparison.notes), "base": _facts(comparison.base), "new": _facts(comparison.new),
        "alpha": rules.alpha, "correction": rules.correction, "resamples": comparison.resampling.resamples,
        "seed": comparison.resampling.seed,
        "findings": [_finding(finding) for finding in comparison.findings],
        "stages": [
            {"name": stage.name, "frames": list(stage.frames), "block": stage.block, **asdict(stage.sizes),
             "agreement": asdict(comparison.agreements[stage.name])}
            for stage in comparison.stages
        ],
    }  # fmt: skip
    path.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _facts(run: RunFrames) -> dict[str, Any]:
    return {"name": run.name, **{key: run.facts[key] for key in _FACTS if key in run.facts}}


def _finding(finding: Finding) -> dict[str, Any]:
    one = finding.estimate
    return {
        "stage": one.stage, "metric": one.metric.key, "unit": one.metric.unit, "base": one.base, "new": one.new,
        "low": one.interval.low if one.interval else None, "high": one.interval.high if one.interval else None,
        "p": one.interval.p if one.interval else None, "p_corrected": finding.p, "margin": finding.margin,
        "limit": finding.limit, "breaks_limit": finding.breaks_limit, "conspicuous": finding.conspicuous,
        "verdict": finding.verdict.value, "samples": one.samples, "needed": finding.needed, "counted_in": one.kind,
        "notes": list(finding.notes),
    }  # fmt: skip


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value; NaN is null there
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
