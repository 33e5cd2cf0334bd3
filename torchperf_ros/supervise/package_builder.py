"""Sees to it that packages that a stage misses are compiled in the background, once."""

from collections.abc import Callable, Iterable
from typing import Any

from torchperf_ros.core.errors import ProtocolError
from torchperf_ros.supervise.compile_process import CompileProcess


class PackageBuilder:
    """Compiles one stage's missing packages; everything is called by the crew's thread.

    Attributes:
        progress: for `/diagnostics`, for example `compiling 2 of 3`; "" when there is nothing to do.
    """

    def __init__(self, setup: dict[str, Any], built: Callable[[str], None], told: Callable[[str], None]) -> None:
        """Take the stage's setup, and who hears that a tier's package is there, and what went wrong."""
        self.progress = ""
        self._setup = setup
        self._built = built
        self._told = told
        self._tried: set[str] = set()
        self._process: CompileProcess | None = None
        self._held = False
        self._count = 0
        self._failure_told = False

    @property
    def news(self) -> int | None:
        """Descriptor to wait for, None while nothing is compiled."""
        return None if self._process is None else self._process.news

    def want(self, tiers: Iterable[str]) -> None:
        """Compile these tiers, unless that was tried before or something is being compiled."""
        wanted = [tier for tier in tiers if tier not in self._tried]
        if not wanted or self._process is not None or not self._setup.get("compile_missing", True):
            return
        numbers = [self._setup["tiers"].index(tier) for tier in wanted]
        job = {
            **{key: self._setup[key] for key in ("adapter", "options", "device", "threads", "cache_dir", "cache_mib")},
            "tiers": wanted,
            "build": [self._setup["build"][number] for number in numbers],
            "packages": [self._setup["packages"][number] for number in numbers],
        }
        self._tried |= set(wanted)
        self._count = len(wanted)
        self.progress = f"compiling 1 of {self._count}"
        try:
            self._process = CompileProcess(job, background=True)
            self._held = self._failure_told = False
        except OSError as error:
            self.progress = ""
            self._told(f"packages of {', '.join(wanted)} cannot be compiled: {error}")

    def hold(self, *, held: bool) -> None:
        """Let what compiles stand still while a worker is missing: its replacement needs the processor more."""
        if self._process is not None and held != self._held:
            self._process.hold(held)
            self._held = held

    def listen(self) -> None:
        """Take in what the process says; clean up when it has ended."""
        if self._process is None:
            return
        try:
            messages = self._process.listen()
        except ProtocolError as error:
            self._told(str(error))
            self.stop()
            return
        if messages is None:
            reason = self._process.death_reason()
            if reason and not self._failure_told:
                self._told(reason)
            self.stop()
            return
        for message in messages:
            if message["kind"] == "tier":
                self.progress = f"compiling {message['number']} of {self._count}"
            elif message["kind"] == "built":
                self._built(message["tier"])
            elif message["kind"] == "failed":
                self._failure_told = True
                self._told(f"tier {message['tier']} stays in eager: {message['text']}")

    def stop(self) -> None:
        """End what is running."""
        self.progress = ""
        if self._process is not None:
            self._process.close()
            self._process = None
