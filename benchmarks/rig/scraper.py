"""Scrapes a node's exporter as Prometheus does, from the onlooker's process."""

import contextlib
import gzip
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.rig.observer import Row

_NS_PER_MS = 1e6


@dataclass
class Scrapes:
    """What the scraper saw: begin and end of each scrape (system clock, ns), bytes of the last page."""

    spans_ns: list[tuple[int, int]] = field(default_factory=list)
    page_bytes: int = 0
    page_lines: int = 0

    @contextlib.contextmanager
    def every(self, seconds: float, port: int) -> Iterator[None]:
        """Scrape so often while the context lasts."""
        ending = threading.Event()
        scraper = threading.Thread(target=self._run, args=(port, seconds, ending))
        scraper.start()
        try:
            yield
        finally:
            ending.set()
            scraper.join()

    def _run(self, port: int, every_s: float, ending: threading.Event) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"}
        )
        while not ending.wait(every_s):
            began_ns = time.time_ns()
            with urllib.request.urlopen(request, timeout=30) as reply:
                page = gzip.decompress(reply.read())
            self.spans_ns.append((began_ns, time.time_ns()))
            self.page_bytes, self.page_lines = len(page), page.count(b"\n")

    def touches(self, row: Row) -> bool:
        """Whether a scrape was going on while this frame was on its way."""
        received_ns = row.written_ns - row["total_ms"] * _NS_PER_MS
        return any(began <= row.written_ns and ended >= received_ns for began, ended in self.spans_ns)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
