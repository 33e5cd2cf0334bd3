"""Stages with real workers and without a node."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.rig.messages import image_cdr
from torchperf_ros.api.cdr import restamped
from torchperf_ros.settings.config import NodeConfig
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.worker_setup import worker_setup

HEIGHT, WIDTH = 72, 128


def at_pace(seconds: float, rate: float, act: Callable[[int], None]) -> None:
    """Act so many times a second for so long, each time with its number from 0 on."""
    begin = time.monotonic()
    for number in range(round(seconds * rate)):
        time.sleep(max(0.0, begin + number / rate - time.monotonic()))
        act(number)


class BareStage:
    """One stage of a configuration, or one stream of it; its answers and what it logs are kept."""

    def __init__(
        self,
        config: NodeConfig,
        name: str,
        options: Mapping[str, Any],
        *,
        beside: "BareStage | None" = None,
        size: tuple[int, int] = (WIDTH, HEIGHT),
        **changes: Any,
    ) -> None:
        """Prepare it; `options` are those of its adapter, `changes` those of its workers' setup.

        `beside` is another stream of the same stage, `size` is width and height of its images.
        """
        self.answers: list[Answer] = []
        self.logs: list[str] = []
        self.news = threading.Condition()
        # to the next stage
        self.hand_on: Callable[[bytes | None, Frame], None] = lambda payload, frame: None
        stage = next(each for each in config.stages if each.name == name)
        ports = StagePorts(
            publish=lambda payload: None,
            hand_on=self._hand_on,
            answered=self._answered,
            anomaly=lambda alert: None,
            log=lambda severity, text: self.logs.append(f"{severity}: {text}"),
        )
        setup = replace(worker_setup(stage.whole_stage, config), options=dict(options), **changes)
        self.actor = Stage(stage, setup, ports, time.time_ns, beside=beside and beside.actor)
        self._image = image_cdr(*size)
        self._first_pixel = len(self._image) - size[0] * size[1] * 3

    def _hand_on(self, payload: bytes | None, frame: Frame) -> None:
        self.hand_on(payload, frame)

    def _answered(self, answer: Answer) -> None:
        with self.news:
            self.answers.append(answer)
            self.news.notify_all()

    def start(self, within_s: float = 120.0) -> None:
        """Start the workers, and take frames when the first can serve."""
        self.actor.start()
        self.actor.activate()
        self.until(lambda: self.actor.pool.ready, "a worker is ready", within_s)

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 120.0) -> None:
        """Wait until a condition holds; a `TimeoutError` if it does not in time."""
        give_up_at = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > give_up_at or self.actor.pool.gave_up:
                msg = f"not within {within_s:.0f} s: {what}: {self.actor.pool.progress}; {self.logs[-3:]}"
                raise TimeoutError(msg)
            time.sleep(0.005)

    def offer(self, first_byte: int = 0) -> None:
        """Offer an image that is stamped now, and whose first pixel begins with this byte."""
        data, stamp_ns = bytearray(self._image), time.time_ns()
        data[self._first_pixel] = first_byte
        self.actor.offer(restamped(bytes(data), stamp_ns), stamp_ns, stamped=True)

    def feed(
        self, seconds: float, rate: float, before: Callable[[int], None] = lambda number: None
    ) -> None:
        """Offer images at this pace, and before each call what is given with its number."""

        def offer(number: int) -> None:
            before(number)
            self.offer()

        at_pace(seconds, rate, offer)
