"""Which scene a frame is answered for: by speed, by a topic, or by the adapter."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.messages import decode
from torchperf_ros.safety.odometry import Motion
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.settings.stage_options import EMERGENCY_SCENE, ODOMETRY, SceneOptions
from torchperf_ros.stage.turn import Output
from torchperf_ros.workers.worker_pool import WorkerPool

# Index of the scene that runs where no other holds, or none that can run.
DEFAULT = 0
# m/s: the active scene holds so much beyond its limits, or noise at a limit would switch each second
_SPEED_BAND = 0.5
_NEAR_S = 4.0  # time to collision below which the budget shrinks


class _Heard(NamedTuple):
    """A value and when it came; the time is monotonic."""

    value: float | str | None
    at_ns: int


_NOTHING = _Heard(None, 0)


class SceneChooser:
    """Chooses the scene of each frame.

    The rules take the first scene that holds, `emergency` before all others. A change needs `scene_hold_s`
    since the last one, but for one to `emergency`. A scene that cannot run, as its tiers are not loaded, is
    `default` meanwhile.

    `moved` and `named` are for any thread, `choose` is for the one that offers frames; each replaces whole
    objects.

    Attributes:
        active: index of the scene that the last frame got.
        wanted: the one that the rules took for it, loaded or not.
        forced: one that is to run regardless of the rules, but for `emergency`; None mostly.
        ready: scenes whose tiers are loaded in every worker that serves.
        word: index of the scene that the adapter named last; -1: it named none, or the worker that did is
            gone.
        word_of: that worker; None where it is gone.
        switches: how often the active scene has changed.
        unknown: the last name on a topic that no scene has, "" if there was none.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config = config  # the stage's; replaced as a whole when a parameter changes
        self.active = self.wanted = DEFAULT
        self.forced: int | None = None
        self.ready: frozenset[int] = frozenset()
        self.word, self._word_seq = -1, 0
        self.word_of: object = None
        self.switches = 0
        self.unknown = ""
        self._heard: dict[int | str, _Heard] = {}  # `speed`, `ttc`, and by scene the word of its topic
        self._changed_ns: int | None = None
        self._used_ns = [0] * len(config.scenes)
        self._cold = DEFAULT  # the last scene whose tiers were asked for
        emergency = next((n for n, one in enumerate(config.scenes) if one.name == EMERGENCY_SCENE), None)
        self.emergency = emergency  # its index, None where there is none
        others = [number for number in range(1, len(config.scenes)) if number != emergency]
        self._order = others if emergency is None else [emergency, *others]

    def hear(self, index: int, data: bytes, now_ns: int) -> None:
        """A message that scenes depend on, as CDR bytes; see `StageConfig.situation_inputs` for its index.

        Raises:
            BadInput: it is no such message.
        """
        if index == ODOMETRY:
            self.moved(abs(Motion.read(data, now_ns).speed), now_ns)
        else:
            self.named(ODOMETRY - index, decode(data, "std_msgs/msg/String").data.strip(), now_ns)

    def moved(self, speed: float, now_ns: int) -> None:
        """The vehicle's speed in m/s; NaN where it is unknown."""
        self._heard["speed"] = _Heard(speed, now_ns)

    def named(self, scene: int, word: str, now_ns: int) -> None:
        self._heard[scene] = _Heard(word, now_ns)
        if word not in {one.word or one.name for one in self.config.scenes}:
            self.unknown = word

    def name(self, scene: int, worker: object, seq: int) -> None:
        """A worker has found which scene the frame `seq` shows.

        -1: none. A word about an older frame is late.
        """
        if seq >= self._word_seq:
            self.word, self.word_of, self._word_seq = scene, worker, seq

    def forget_word(self) -> None:
        """Take none for the one that the adapter named, until it names one anew."""
        self.word, self.word_of = -1, None

    def near(self, ttc_s: float, now_ns: int) -> None:
        """The time to collision in s; NaN or infinite where there is none."""
        self._heard["ttc"] = _Heard(ttc_s, now_ns)

    def check_output(self, output: Output, now_ns: int) -> Output:
        """Take the time to collision that the guard has found."""
        if output.checked is not None:
            self.near(output.checked.ttc_s, now_ns)
        return output

    def ttc_s(self, now_ns: int) -> float | None:
        """The time to collision in s, None where there is none, or it is too old."""
        return self._number("ttc", now_ns)

    def speed(self, now_ns: int) -> float | None:
        """The speed in m/s, None where it is unknown or too old."""
        return self._number("speed", now_ns)

    def _number(self, what: str, now_ns: int) -> float | None:
        heard = self._fresh(what, now_ns)
        return None if heard is None or not math.isfinite(heard) else float(heard)

    def force(self, name: str) -> None:
        """Run the scene of this name regardless of the rules, see `forced`; "" for none."""
        names = [scene.name for scene in self.config.scenes]
        self.forced = names.index(name) if name else None

    def budget_ms(self, scene: int, now_ns: int, least_ms: Callable[[int], float]) -> float:
        """The budget of a frame of this scene, see `situation_budget_ms`.

        `least_ms` gives the shortest that makes sense.
        """
        config, budget_ms = self.config, self.config.scene_budget_ms(scene)
        if not config.budget_least_ms:
            return budget_ms
        return situation_budget_ms(
            config, budget_ms, self.speed(now_ns), self.ttc_s(now_ns), least_ms(scene)
        )

    def choose(self, now_ns: int) -> int:
        if len(self._used_ns) == 1:
            return DEFAULT
        wanted = next((number for number in self._order if self._holds(number, now_ns)), DEFAULT)
        if self.forced is not None and wanted != self.emergency:
            wanted = self.forced
        self.wanted, self._used_ns[wanted] = wanted, now_ns
        scene = wanted if wanted in self.ready else DEFAULT
        if scene != self.active and (self._may_change(now_ns) or scene == self.emergency):
            self.active, self._changed_ns = scene, now_ns
            self.switches += 1
        elif (
            self.active not in self.ready
        ):  # its tiers are gone: this frame is not to wait for the right to change
            self.active = DEFAULT
        return self.active

    def _may_change(self, now_ns: int) -> bool:
        return self._changed_ns is None or now_ns - self._changed_ns >= self.config.scene_hold_s * NS_PER_S

    def _fresh(self, what: int | str, now_ns: int) -> Any:  # noqa: ANN401 - a number, or a word
        """Its last value, None if that is too old."""
        heard = self._heard.get(what, _NOTHING)
        return heard.value if now_ns - heard.at_ns <= self.config.input_timeout_ms * NS_PER_MS else None

    def _holds(self, number: int, now_ns: int) -> bool:
        scene = self.config.scenes[number]
        if self.word == number:
            return True
        if not scene.topic and not scene.by_speed:
            return False
        if scene.topic and self._fresh(number, now_ns) != scene.word:
            return False
        return not scene.by_speed or self._has_speed_of(scene, number, now_ns)

    def _has_speed_of(self, scene: SceneOptions, number: int, now_ns: int) -> bool:
        speed, band = self.speed(now_ns), _SPEED_BAND if number == self.active else 0.0
        return speed is not None and scene.min_speed - band <= speed <= scene.max_speed + band

    def to_load(self) -> tuple[int, ...]:
        """Scenes whose tiers are to be loaded.

        `default`, `emergency`, and of the others those wanted last.
        """
        always = [DEFAULT] if self.emergency is None else [DEFAULT, self.emergency]
        others = sorted(
            (n for n in self._order if n != self.emergency), key=lambda number: -self._used_ns[number]
        )
        return tuple(sorted([*always, *others[: self.config.scenes_loaded]]))

    def tiers_to_load(self) -> list[int]:
        """The stage's tiers that workers are to load, of those scenes."""
        return sorted({tier for number in self.to_load() for tier in self.config.scenes[number].tiers})

    def load_wanted(self, pool: WorkerPool) -> str:
        """Have the pool load the tiers of the wanted scene; frames run `default` meanwhile.

        Returns what to report; "" where that was reported before, or where nothing begins now.
        """
        begins = pool.ready and pool.rolling_update.renewal.load(self.tiers_to_load())
        if not begins or self.wanted == self._cold:
            return ""
        self._cold = self.wanted  # it is asked for again where that fails, and not reported again
        return f"scene {self.config.scenes[self.wanted].name} is not loaded; default runs until it is"

    def look_at(self, pool: WorkerPool) -> None:
        """Take which scenes the workers that serve have loaded."""
        self.loaded(worker.loaded for worker in pool.everyone if worker.usable)

    def loaded(self, tiers: Iterable[frozenset[int] | None]) -> None:
        """Take which of the stage's tiers each worker that serves has loaded; None: all."""
        every = list(tiers)
        self.ready = frozenset(
            number
            for number, scene in enumerate(self.config.scenes)
            if every and all(has is None or has.issuperset(scene.tiers) for has in every)
        )


def situation_budget_ms(
    config: StageConfig, budget_ms: float, speed: float | None, ttc_s: float | None, least_ms: float
) -> float:
    """The budget of a frame, between `budget_least_ms` and the scene's.

    It falls evenly with the speed, from the scene's at rest to `budget_least_ms` at `budget_fast_speed`,
    and with the time to collision from 4 s down to 0; the shorter one counts. What is unknown
    shortens nothing.

    Args:
        config: the stage's parameters.
        budget_ms: the scene's.
        speed: in m/s, None where it is unknown.
        ttc_s: time to collision, None where it is unknown or there is none.
        least_ms: what the cheapest tier takes, with the time to publish: no budget that follows is below.
    """
    shortest_ms = config.budget_least_ms
    if not 0.0 < shortest_ms < budget_ms:
        return budget_ms
    room = 1.0 if speed is None else 1.0 - speed / config.budget_fast_speed
    if ttc_s is not None:
        room = min(room, ttc_s / _NEAR_S)
    wanted_ms = shortest_ms + (budget_ms - shortest_ms) * min(max(room, 0.0), 1.0)
    return min(budget_ms, max(wanted_ms, least_ms))
