"""What a replay's `--json` says besides its frames."""

import hashlib
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchperf_ros import __version__
from torchperf_ros.core.anomaly_rules import Anomaly
from torchperf_ros.core.machine_fingerprint import machine_facts
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_result import StageResult
from torchperf_ros.supervise.stage_actor import StageActor

_BLOCK: Final = 1 << 20
_MOST_ANOMALIES: Final = 1000


def log_hash(path: Path) -> str:
    """SHA-256 of a log: of the file, or of the names and contents of all files in the folder.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        if file != path:
            digest.update(os.fsencode(file.relative_to(path)) + f"\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while block := content.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def model_hashes(actors: Sequence[StageActor]) -> dict[str, str]:
    """Hash of weights and code of all tiers, by stage."""
    found = {}
    for actor in actors:
        worker = next((worker for worker in actor.crew.everyone if worker.tiers), None)
        texts = [] if worker is None else [str(tier.get("model", "")) for tier in worker.tiers]
        found[actor.config.name] = hashlib.sha256("".join(texts).encode()).hexdigest() if any(texts) else ""
    return found


def compile_s(actors: Sequence[StageActor]) -> float | None:
    """Seconds in which torch.compile made the first workers' tiers ready; None where no tier runs by it."""
    workers = [next(iter(actor.crew.everyone), None) for actor in actors]
    tiers = [tier for worker in workers if worker is not None for tier in worker.tiers if tier["engine"] == "compile"]
    return sum(float(tier["load_s"]) for tier in tiers) if tiers else None


def device_of(actors: Sequence[StageActor]) -> str:
    """What the models ran on, for example `cpu`."""
    described = [actor.crew.description for actor in actors if actor.crew.description is not None]
    return described[0].device if described else ""


def commit_of(folder: Path) -> str:
    """The commit that a folder's files are of, with `-dirty` where they differ from it; empty outside of git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a file system that hangs
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def stage_results(actors: Sequence[StageActor], record: ReplayRecord, output: Path | None) -> list[StageResult]:
    """What became of each stage's frames; `output` is the MCAP that holds what it published."""
    results = []
    for index, actor in enumerate(actors):
        config, prefix = actor.config, f"{actor.config.name}: "
        results.append(
            StageResult(
                config.name, config.tiers, record.topics[index], record.types[index], config.budget_ms,
                record.tables[index].rows(), actor.journal.statistics.frames, actor.mailbox.superseded,
                actor.mailbox.stale, tuple(pair for pair in record.anomalies if pair[1].name.startswith(prefix)),
                record.reasons[index], output,
            )
        )  # fmt: skip
    return results


def stage_summary(stage: StageResult) -> dict[str, Any]:
    """One stage: counts, latency, and what it is."""
    fallbacks = stage.fallbacks
    return {
        "name": stage.name, "tiers": list(stage.tiers), "output": stage.output_topic, "type": stage.output_type,
        "budget_ms": stage.budget_ms, "received": stage.received, "answered": len(stage.frames),
        "superseded": stage.superseded, "stale": stage.stale, "outcomes": dict(stage.outcomes),
        "fallbacks": dict(fallbacks), "miss_ratio": known(stage.miss_ratio), "p50_ms": known(stage.p50_ms),
        "p95_ms": known(stage.p95_ms), "p99_ms": known(stage.p99_ms), "max_ms": known(stage.max_ms),
        "reasons": {str(seq): reason.partition("\n")[0] for seq, reason in stage.reasons.items()},
    }  # fmt: skip


def anomalies_summary(anomalies: Sequence[tuple[int, Anomaly]]) -> list[dict[str, Any]]:
    """The first 1,000 anomalies as JSON values."""
    return [
        {"t_ns": t_ns, "level": a.level.name, "name": a.name, "message": a.message, "values": dict(a.values)}
        for t_ns, a in anomalies[:_MOST_ANOMALIES]
    ]


def place_summary(device: str) -> Mapping[str, Any]:
    """Where and by what the replay was done."""
    return {"machine": machine_facts(device), "commit": commit_of(Path.cwd()), "torchperf_ros": __version__}


def known(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None
