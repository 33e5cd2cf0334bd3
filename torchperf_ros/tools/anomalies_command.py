"""The command `torchperf anomalies`: a series or a run in, a score for each row out."""

import csv
import math
import os
import re
import sys
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from torchperf_ros.tools.shell import File, check_outputs, fail

_MISSING = {"", "nan", "na", "n/a", "null", "none", "-", "?"}
Sample = tuple[str, str, float, float]  # time and value as they were written, and as numbers


def anomalies(
    file: Annotated[Path, Argument(help="A CSV file of timestamp,value rows, or a run of replay.")],
    output: Annotated[
        File, Option("--output", "-o", help="Default: FILE.anomalies.csv; -: stdout.")
    ] = None,
    caution: Annotated[
        float | None, Option(min=1.0, max=4.0, help="Surprise; default 1, of a run 1.4.")
    ] = None,
    stage: Annotated[str, Option(help="Of a run: whose latency; default: the last stage's.")] = "",
) -> None:
    """Score every row of a time series from 0 (usual) to 1 (unlike anything before it).

    The output has each row again: timestamp,value,anomaly_score; 0.5 and more is an anomaly.

    Example: torchperf anomalies run.parquet --stage perception -o - | head
    """
    from torchperf_ros.observe.watch.series_detector import FRAME_CAUTION, THRESHOLD, SeriesDetector

    is_run, target = file.suffix in {".json", ".parquet"}, output or file.with_suffix(".anomalies.csv")
    to_stdout = target == Path("-")
    if not file.is_file():
        fail(f"{file}: is no file; name a CSV file or a run")
    check_outputs({"--output": None if to_stdout else target}, [file])
    samples = _run_samples(file, stage) if is_run else _csv_samples(file)
    detector = SeriesDetector(caution=caution or (FRAME_CAUTION if is_run else 1.0))
    scores = [detector.update(time, value).score for _, _, time, value in samples]
    try:
        with nullcontext(sys.stdout) if to_stdout else open(target, "w", encoding="utf-8") as out:
            out.write("timestamp,value,anomaly_score\n")
            rows = csv.writer(out, lineterminator="\n")
            rows.writerows((*one[:2], f"{score:.6f}") for one, score in zip(samples, scores, strict=True))
            out.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    found = sum(score >= THRESHOLD for score in scores)
    sys.stderr.write(f"{file}: {len(samples):,} rows; {found:,} score {THRESHOLD} and more; in {target}\n")


def _csv_samples(path: Path) -> list[Sample]:
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    reader = csv.reader(lines, delimiter=max(",;\t", key="".join(lines).count))
    samples: list[Sample] = []
    at: tuple[int, int] | None = None
    for fields in filter(None, reader):
        if at is None and not samples and not any(re.match(r"\s*[-+.]?\d", field) for field in fields):
            names = [name.strip().lower() for name in fields]
            time = names.index("timestamp") if "timestamp" in names else 0
            at = time, names.index("value") if "value" in names else int(time == 0)
            continue
        try:
            samples.append(_sample(*(fields[column] for column in at or (0, 1))))
        except (IndexError, ValueError):
            right = "a row is timestamp,value: an ISO time or a number, and a number, NaN or nothing"
            fail(f"{path}:{reader.line_num}: {','.join(fields)!r}: {right}")
    return samples or fail(f"{path}: has no rows; a row is timestamp,value")


def _sample(written: str, text: str) -> Sample:
    try:
        time = float(written)
    except ValueError:
        # Python 3.10 reads neither a Z nor fractions of other than 3 or 6 digits.
        iso = re.sub(r"[zZ]$", "+00:00", written.strip().replace("/", "-"))
        date = datetime.fromisoformat(re.sub(r"\.(\d+)", lambda m: "." + m[1][:6].ljust(6, "0"), iso))
        time = (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    if not math.isfinite(time):
        raise ValueError(written)
    return written, text, time, math.nan if text.strip().lower() in _MISSING else float(text)


def _run_samples(path: Path, stage: str) -> list[Sample]:
    from torchperf_ros.observe.runs.run_log import read_run

    frames = read_run(path).frames
    name = stage or list(frames)[-1]
    if name not in frames or not len(frames[name]):
        fail(f"{path}: has no frames of stage {name!r}; its stages: {', '.join(frames)}")
    pairs = zip((frames[name]["t_ns"] / 1e9).tolist(), frames[name]["total_ms"].tolist(), strict=True)
    return [(f"{at:.6f}", f"{ms:.3f}", at, ms) for at, ms in pairs]
