"""Whether scraping the exporter makes answers late: the same stream with a scrape every second and without, in turns.

One node, one camera. The scraper, in the onlooker's process, asks as Prometheus does and notes when each scrape began
and ended; so the frames that were on their way through the node during a scrape can be looked at alone.

Lateness is receipt to publish less the budget; overhead is the same less the model's own steps, which the scrape has
no part in. Processor time is the node process's, with scrapes less without, for each scrape.
"""

import argparse
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.rig.arguments import add_backup, add_camera, add_stage, arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import Streaming
from benchmarks.rig.lateness import lateness, show_lateness
from benchmarks.rig.observer import Row
from benchmarks.rig.report import Report, Target, say
from benchmarks.rig.scraper import Scrapes, free_port

_NS_PER_MS = 1e6
_FIRST_FRAMES = 10  # of each slice: after the pause, caches are cold
_WITH, _WITHOUT, _DURING = "with scrapes", "without", "during a scrape"
_ROOM_MS = 0.1
_EPILOG = """\
target: p99.9 of the lateness moves by no more than 0.1 ms

examples:
  ./run bench scrape
  ./run bench scrape --seconds 120 --every 0.2 --json scrape.json"""


@dataclass
class Slices:
    """What the slices of one kind add up to."""

    rows: list[Row] = field(default_factory=list)
    processor_s: float = 0.0


def main() -> int:
    arguments = _parser().parse_args()
    report = Report("scrape", arguments)
    slices, scrapes = _measure(arguments)
    figures = _figures(slices, scrapes)
    _show(report, figures)
    moved_ms = figures[_WITH]["lateness_ms"]["p99_9"] - figures[_WITHOUT]["lateness_ms"]["p99_9"]
    report.finish(figures, [Target("p99.9 of the lateness, with scrapes less without", moved_ms, "<=", _ROOM_MS, "ms")])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=60.0, help="of stream with and without each (default 60)")
    parser.add_argument("--slice", type=float, default=10.0, help="seconds of each turn (default 10)")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between scrapes (default 1)")
    add_camera(parser)
    add_stage(parser)
    add_backup(parser)
    return parser


def _measure(arguments: argparse.Namespace) -> tuple[dict[str, Slices], Scrapes]:
    port = free_port()
    slices, scrapes = {_WITHOUT: Slices(), _WITH: Slices()}, Scrapes()
    with Streaming(arguments, metrics_port=port) as streaming:
        process, seen = psutil.Process(streaming.node.pid), streaming.seen
        seconds = min(arguments.slice, arguments.seconds)
        for turn in range(max(1, round(arguments.seconds / seconds))):
            for kind, found in slices.items():
                say(f"turn {turn + 1}: {kind}, {seconds:g} s")
                ending = threading.Event()
                scraper = threading.Thread(target=scrapes.run, args=(port, arguments.every, ending))
                seen.clear()
                before_s = sum(process.cpu_times()[:2])
                if kind == _WITH:
                    scraper.start()
                streaming.stream(seconds)
                ending.set()
                if kind == _WITH:
                    scraper.join()
                found.processor_s += sum(process.cpu_times()[:2]) - before_s
                found.rows += seen.rows[_FIRST_FRAMES:]
    return slices, scrapes


def _figures(slices: dict[str, Slices], scrapes: Scrapes) -> dict[str, Any]:
    rows = {kind: found.rows for kind, found in slices.items()}
    rows[_DURING] = [row for row in rows[_WITH] if scrapes.touches(row)]
    more_ms = 1000 * (slices[_WITH].processor_s - slices[_WITHOUT].processor_s)
    return {
        **{kind: lateness(found) for kind, found in rows.items()},
        "scrape_ms": distribution([(end_ns - began_ns) / _NS_PER_MS for began_ns, end_ns in scrapes.spans_ns]),
        "processor_ms_per_scrape": more_ms / max(1, len(scrapes.spans_ns)),
        "page_bytes": scrapes.page_bytes,
        "page_lines": scrapes.page_lines,
    }


def _show(report: Report, figures: dict[str, Any]) -> None:
    show_lateness(report, {kind: figures[kind] for kind in (_WITHOUT, _WITH, _DURING)})
    took = figures["scrape_ms"]
    report.table("The scrapes", ("", ""), [
        ["scrapes", took["count"]],
        ["took, p50 / max, in ms", f"{took['p50']:.2f} / {took['max']:.2f}"],
        ["processor time of the node for each, in ms", figures["processor_ms_per_scrape"]],
        ["page", f"{figures['page_lines']} lines, {figures['page_bytes'] / 1024:.0f} KiB"],
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
