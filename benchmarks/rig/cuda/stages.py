"""Stages with real workers on a part's device, and the parts that measure them: `contexts`, `cameras`, `steps`."""

import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.rig.bare_stage import HEIGHT, WIDTH, BareStage, at_pace
from benchmarks.rig.cuda.adapter import NAMES
from benchmarks.rig.cuda.networks import ADAPTER, RESNET
from benchmarks.rig.cuda.place import MIB, THREADS, Found, Place
from benchmarks.rig.report import Target, say
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.settings.config import node_config
from torchperf_ros.stage.frame import Answer

FRAME_EVERY_S: Final = 0.05
_STARTS_WITHIN_S: Final = 120.0
_MOST_FRAME_BYTES: Final = 2 * MIB
_MOMENT_S: Final = 0.5  # for a driver to give memory back
_CAMERA: Final = "torchperf_ros.models.camera:CameraAdapter"

_CAMERAS: Final = ("front", "front_left", "front_right", "left", "right", "rear")
_CAMERA_BUDGET_MS: Final = 33.0
_STREAMS, _EACH = "streams of one stage", "a stage each"
_ARM_COLUMNS: Final = ("in_time_hz", "kept_hz", "mib", "batched", "runs in")
_FIRST_HZ, _STEP_HZ, _STEPS = 30.0, 1.6, 6
_ENOUGH: Final = 0.6  # of the frames; where fewer are in time the ramp ends
_LEAST_TIMES_FRAMES, _MOST_MEMORY = 2.0, 0.4
_IN_TIME: Final = 0.99

_STEPS_HZ, _STEPS_SLICE_S, _STEPS_TURNS = 30.0, 2.0, 4
_STEPS_SIZE: Final = (640, 640)
_FIRST_FRAMES: Final = 5  # of a slice
_MOST_OF_BARE: Final = 1.05


class WorkerStage(BareStage):
    """A stage on a part's device, or one stream of it."""

    def __init__(
        self,
        place: Place,
        adapter: str,
        options: Mapping[str, Any],
        *,
        stream: str = "",
        beside: "WorkerStage | None" = None,
        size: tuple[int, int] = (WIDTH, HEIGHT),
        **parameters: object,
    ) -> None:
        values = {
            "adapter": adapter,
            "output": "path",
            "tiers": ["full", "fast"],
            "backup": "standby",
            "budget_ms": 1000.0 * FRAME_EVERY_S,
            "hang_ms": 200.0,
            "max_frame_bytes": _MOST_FRAME_BYTES,
            "engine": "eager",
            **parameters,
        }
        node = {
            "stages": ["bench"],
            "device": place.name,
            "worker_threads": THREADS,
            "cache_dir": str(place.folder / "cache"),
            # What is built meanwhile would show in times and memory.
            "compile_missing": False,
        }
        super().__init__(
            node_config(node, {"bench": values}),
            f"bench.{stream}" if stream else "bench",
            options,
            beside=beside,
            size=size,
            start_timeout_s=_STARTS_WITHIN_S,
        )

    def start(self, within_s: float = _STARTS_WITHIN_S) -> float:
        """Start the workers and wait for all; returns the seconds until the first can serve."""
        started = time.monotonic()
        super().start(within_s)
        took_s = time.monotonic() - started
        self.settle()
        return took_s

    def settle(self) -> None:
        """Wait until every worker is there and idle."""
        workers = self.actor.pool.workers
        self.until(lambda: all(w is not None and w.idle for w in list(workers)), "all workers are idle")

    def ask(self, fault: str = "") -> Answer:
        """Offer one frame at the stage's pace and wait for its answer."""
        seen, next_at = len(self.answers), time.monotonic() + FRAME_EVERY_S
        self.offer(NAMES.index(fault) + 1 if fault else 0)
        with self.news:
            if not self.news.wait_for(lambda: len(self.answers) > seen, _STARTS_WITHIN_S):
                raise TimeoutError(f"a frame was not answered: {fault or 'no fault'}")
        time.sleep(max(0.0, next_at - time.monotonic()))
        return self.answers[seen]

    def runs_in(self) -> str:
        """What its first worker runs its first tier in, and why not in what was asked for."""
        first = self.actor.pool.workers[0]
        facts = first.reported.tiers[0] if first and first.reported.tiers else None
        return " ".join(filter(None, [facts.engine, facts.why])) if facts else ""


@contextmanager
def running(stages: Sequence[WorkerStage]) -> Iterator[None]:
    """Have stages run, all at once; those that share workers are stopped in reverse."""
    try:
        for stage in stages:
            stage.actor.start()
            stage.actor.activate()
        for stage in stages:
            stage.until(lambda stage=stage: stage.actor.pool.ready, "a worker is ready", _STARTS_WITHIN_S)
            stage.settle()
        yield
    finally:
        for stage in reversed(stages):
            stage.actor.stop()


@contextmanager
def going_on(wrong: list[str], what: str) -> Iterator[None]:
    """Context of one of several measurements: what ends it is named, and the others are made."""
    try:
        yield
    except Exception as error:  # the boundary of a measurement, on a device that one has for minutes
        traceback.print_exc()
        wrong.append(f"{what}: {type(error).__name__}: {error}".splitlines()[0])


def of_network(place: Place, precision: str = "fp32", **options: Any) -> dict[str, Any]:
    """A stage's parameters for the large network, and the options of its adapter."""
    return {
        "adapter": ADAPTER,
        "options": {"network": RESNET, "small": not place.is_cuda, **options},
        "tiers": ["full"],
        "precision": [precision],
        "channels_last": precision == "fp16",
    }


# -- contexts

_IMPORTS: Final = "import torch; from benchmarks.rig.cuda.networks import NetworkAdapter"
_ONLY: Final = "x = torch.zeros(1, device=DEVICE)"
_LIBRARIES: Final = f"""{_ONLY}
conv = torch.nn.Conv2d(3, 8, 3).to(DEVICE)
with torch.inference_mode():
    conv(torch.zeros(1, 3, 64, 64, device=DEVICE))
    torch.zeros(64, 64, device=DEVICE) @ torch.zeros(64, 64, device=DEVICE)"""
_BY_HAND: Final = f"""{_ONLY}
adapter = NetworkAdapter({{"network": "{RESNET}", "small": not DEVICE.startswith("cuda")}}, torch.device(DEVICE))
with torch.inference_mode():
    adapter.build("full")(*adapter.example_inputs("full"))"""


def contexts(place: Place) -> Found:
    """What one process on the device costs in its memory, and what a standby costs."""
    rows: list[tuple[str, float, float, str]] = []
    nan, codes = (
        math.nan,
        {
            "a process with a context": _ONLY,
            "the same that has convolved and multiplied": _LIBRARIES,
            f"the same with {RESNET}, by hand in eager": _BY_HAND,
        },
    )
    engine = "graph" if place.is_cuda else "eager"
    stages: list[tuple[str, dict[str, Any]]] = [
        (f"{RESNET}, {engine}", {**of_network(place), "engine": engine}),
        ("the camera's detector", {"adapter": _CAMERA, "options": {}, "engine": engine, "tiers": ["full"]}),
    ]
    if place.is_cuda:
        half = {**of_network(place, "fp16"), "engine": engine}
        stages.insert(1, (f"{RESNET}, {engine}, fp16 channels last", half))
    wrong: list[str] = []
    with place.alone():
        with going_on(wrong, "processes by hand"):
            rows += [
                (what, used, nan, "")
                for what, used in zip(codes, _processes_mib(place, codes), strict=True)
            ]
        place.keep(_of_contexts(place, rows, wrong))
        for what, parameters in stages:
            alone = nan
            # What a standby costs is the same for all of them.
            for backup in ("none", "standby") if what == stages[0][0] else ("none",):
                stage = _stage(place, {**parameters, "backup": backup})
                name = f"a stage, backup {backup}: {what}"
                before = place.used_mib()
                with going_on(wrong, name):
                    with running([stage]):
                        stage.ask()
                        time.sleep(_MOMENT_S)
                        used, words = place.used_mib() - before, stage.runs_in()
                    alone = used if backup == "none" else alone
                    rows.append((name, used, used - alone if backup == "standby" else nan, words))
                    say(f"{name}: {used:.0f} MiB")
                time.sleep(_MOMENT_S)
                place.keep(_of_contexts(place, rows, wrong))
    return _of_contexts(place, rows, wrong)


def _of_contexts(
    place: Place, rows: Sequence[tuple[str, float, float, str]], wrong: Sequence[str]
) -> Found:
    figures = {
        what: {"mib": used, "standby_mib": more, "runs in": words} for what, used, more, words in rows
    }
    columns = ("", "MiB of the device", "of that the standby", "runs in")
    none = [f"{what} took no memory" for what, used, *_ in rows if used <= 0 and place.is_cuda]
    return Found([("Memory of the device by process", columns, list(rows))], figures, [*wrong, *none])


def _stage(place: Place, parameters: Mapping[str, Any]) -> WorkerStage:
    given = dict(parameters)
    return WorkerStage(
        place, given.pop("adapter"), given.pop("options"), budget_ms=1000.0, hang_ms=5000.0, **given
    )


def _processes_mib(place: Place, codes: Mapping[str, str]) -> list[float]:
    """The device's memory that each process has which runs one of these; they import side by side, and run in turn."""
    found, processes = [], list[subprocess.Popen[str]]()
    try:
        for code in codes.values():
            lines = [
                f"DEVICE = {place.name!r}",
                _IMPORTS,
                "input()",
                code,
                "print('ready', flush=True)",
                "input()",
            ]
            command = [sys.executable, "-c", "\n".join(lines)]
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for process in processes:
            assert process.stdin
            assert process.stdout
            before = place.used_mib()
            print(file=process.stdin, flush=True)
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"a process with a context ended with {process.wait()}")
            found.append(place.used_mib() - before)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        time.sleep(_MOMENT_S)
    return found


# -- cameras


def cameras(place: Place, precision: str) -> Found:
    """Six cameras: one stage with streams that run together, beside a stage for each; frames in time, and memory."""
    found, rows, arms = Found(), list[Sequence[object]](), dict[str, dict[str, Any]]()
    precision = precision if place.is_cuda else "fp32"
    with place.alone():
        for arm, make in (
            (_STREAMS, _streams),
            ("the same with one worker", partial(_streams, backup="none")),
            (_EACH, _stages_each),
        ):
            say(f"{arm}, {precision}")
            with going_on(found.wrong, arm):
                arms[arm] = _arm(place, make(place, precision))
                rows.append((arm, *(arms[arm][key] for key in _ARM_COLUMNS)))
            time.sleep(_MOMENT_S)
            place.keep(Found(figures=dict(arms), wrong=list(found.wrong)))
    nothing = dict.fromkeys(_ARM_COLUMNS, math.nan)
    ours, each = (arms.get(arm, nothing) for arm in (_STREAMS, _EACH))
    times, share = (ours[what] / each[what] if each[what] else math.nan for what in ("in_time_hz", "mib"))
    rows.insert(0, ("ratio", times, math.nan, share, math.nan, ""))
    columns = (
        "",
        "in time, frames/s at most",
        "each kept up, Hz",
        "MiB of the device",
        "run together",
        "runs in",
    )
    found.tables.append(
        (f"Six cameras, {RESNET}, {precision}, budget {_CAMERA_BUDGET_MS:g} ms", columns, rows)
    )
    steps_of = [
        (arm, *(step[key] for key in ("hz", "in_time_hz", "share", "p50_ms", "batched")))
        for arm, one in arms.items()
        for step in one["ramp"]
    ]
    more = ("", "each, Hz", "in time, frames/s", "in time", "p50 ms", "run together")
    found.tables.append(("The ramp", more, steps_of))
    found.figures = {**arms, "times_frames": times, "share_of_memory": share}
    if place.is_cuda:
        found.targets = [
            Target(
                f"cameras, {precision}: frames in time, streams / stages", times, ">=", _LEAST_TIMES_FRAMES
            ),
            Target(f"cameras, {precision}: memory, streams / stages", share, "<=", _MOST_MEMORY),
        ]
    return found


def _arm(place: Place, stages: list[WorkerStage]) -> dict[str, Any]:
    """Memory and frames in time of these stages, from the first frame to a rate that is too high for them."""
    before = place.used_mib()
    with running(stages):
        for stage in stages:
            stage.ask()
        time.sleep(_MOMENT_S)
        memory, words = place.used_mib() - before, stages[0].runs_in()
        ramp = _ramp(place, stages)
    return {
        "in_time_hz": max(step["in_time_hz"] for step in ramp),
        "kept_hz": max((step["hz"] for step in ramp if step["share"] >= _IN_TIME), default=0.0),
        "mib": memory,
        "batched": max(step["batched"] for step in ramp),
        "runs in": words,
        "ramp": ramp,
    }


def _camera_parameters(place: Place, precision: str) -> dict[str, Any]:
    parameters = of_network(place, precision, batch=True)
    return {
        **parameters,
        "engine": "auto",
        "backup": "none",
        "hang_ms": 2000.0,
        "budget_ms": _CAMERA_BUDGET_MS,
    }


def _streams(place: Place, precision: str, backup: str = "standby") -> list[WorkerStage]:
    """One stage for all; both workers run frames, while each stage of the other arm has a worker for itself."""
    given = {
        **_camera_parameters(place, precision),
        "streams": list(_CAMERAS),
        "batch": "auto",
        "backup": backup,
    }
    adapter, options = given.pop("adapter"), given.pop("options")
    stages: list[WorkerStage] = []
    for name in _CAMERAS:
        first = stages[0] if stages else None
        stages.append(WorkerStage(place, adapter, options, stream=name, beside=first, **given))
    return stages


def _stages_each(place: Place, precision: str) -> list[WorkerStage]:
    given = _camera_parameters(place, precision)
    adapter, options = given.pop("adapter"), given.pop("options") | {"batch": False}
    return [WorkerStage(place, adapter, options, **given) for _ in _CAMERAS]


def _ramp(place: Place, stages: Sequence[WorkerStage]) -> list[dict[str, float]]:
    """More and more frames a second of each camera, until too few are in time."""
    seconds, rate, found = max(1.0, min(1.5, place.seconds)), _FIRST_HZ, list[dict[str, float]]()
    if not place.is_cuda:
        rate /= 5
    for _ in range(_STEPS if place.is_cuda else 2):
        for stage in stages:
            stage.answers.clear()
        batched = sum(stage.actor.statistics.counters.batched for stage in stages)
        began, sent = time.monotonic(), 0

        def all_cameras(_: int) -> None:
            nonlocal sent
            for stage in stages:
                stage.offer()
            sent += len(stages)

        at_pace(seconds, rate, all_cameras)
        took_s = time.monotonic() - began
        time.sleep(2e-3 * _CAMERA_BUDGET_MS)
        answers = [answer for stage in stages for answer in list(stage.answers)]
        good = sum(answer.outcome is Outcome.ON_TIME for answer in answers)
        batched = sum(stage.actor.statistics.counters.batched for stage in stages) - batched
        found.append(
            {
                "hz": sent / len(stages) / took_s,
                "in_time_hz": good / took_s,
                "share": good / sent,
                "batched": batched / max(1, good),
                "p50_ms": float(np.median([a.total_ms for a in answers])) if answers else math.nan,
            }
        )
        say(f"{rate:.0f} Hz each: {found[-1]}")
        if found[-1]["share"] < _ENOUGH:
            break
        rate *= _STEP_HZ
    return found


# -- steps


def steps(place: Place) -> Found:
    """The model's steps in a worker, beside a bare process that does the same at the same pace; marks within."""
    found = Found()
    for engine in ("eager", "graph") if place.is_cuda else ("eager",):
        given = {**of_network(place), "engine": engine, "backup": "none"}
        adapter, options = given.pop("adapter"), given.pop("options")
        given |= {"budget_ms": 500.0, "hang_ms": 5000.0}
        stage = WorkerStage(place, adapter, options, size=_STEPS_SIZE, **given)
        config = {"options": options, "device": place.name, "engine": engine, "size": list(_STEPS_SIZE)}
        with going_on(found.wrong, engine):
            _steps_of(place, engine, stage, config, found)
        place.keep(found)
    return found


def _steps_of(
    place: Place, engine: str, stage: WorkerStage, config: Mapping[str, Any], found: Found
) -> None:
    slice_s = _STEPS_SLICE_S if place.is_cuda else 1.0
    turns = _STEPS_TURNS if place.is_cuda else 1
    ours: list[Answer] = []
    bare: list[dict[str, float]] = []
    again: list[dict[str, float]] = []
    marked: list[dict[str, float]] = []
    with _bare(config) as ask, _bare(config) as ask_again, running([stage]):
        with place.alone():
            for one in (ask, ask_again):
                one(0.0, False)  # it is ready
            for turn in range(turns):
                say(f"{engine}, turn {turn + 1} of {turns}")
                stage.answers.clear()
                stage.feed(slice_s, _STEPS_HZ)
                time.sleep(2 / _STEPS_HZ)
                ours += stage.answers[_FIRST_FRAMES:]
                bare += ask(slice_s, False)[_FIRST_FRAMES:]
                again += ask_again(slice_s, False)[_FIRST_FRAMES:]
                marked += ask(slice_s / 2, True)[_FIRST_FRAMES:]
        words = stage.runs_in()
    _tell_steps(engine, words, ours, {"bare": bare, "bare, once more": again}, marked, found)
    if place.is_cuda and not words.startswith(engine):
        found.wrong.append(f"asked for {engine}, ran in {words}")


def _tell_steps(
    engine: str,
    words: str,
    ours: Sequence[Answer],
    bare: Mapping[str, Sequence[Mapping[str, float]]],
    marked: Sequence[Mapping[str, float]],
    found: Found,
) -> None:
    fresh = [answer for answer in ours if answer.outcome is Outcome.ON_TIME]
    names = ("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
    columns: dict[str, Sequence[float]] = {
        "worker, all steps": [answer.steps.total_ms for answer in fresh],
        **{f"{name}, all steps": [each["whole"] for each in frames] for name, frames in bare.items()},
        **{f"worker: {name[:-3]}": [getattr(a.steps, name) for a in fresh] for name in names},
        "worker: receipt to publish": [answer.total_ms for answer in fresh],
        **{f"bare: {name}": [each[name] for each in marked] for name in (marked[0] if marked else ())},
    }
    figures = {name: _percentiles(values) for name, values in columns.items()}
    own, other, same = (figures[f"{name}, all steps"] for name in ("worker", *bare))
    ratios, alike = ({key: each[key] / other[key] for key in other} for each in (own, same))
    rows: list[Sequence[object]] = [
        ("worker / bare", len(fresh), ratios["p50"], ratios["p99"]),
        # What two processes differ by that do the same.
        ("bare, once more / bare", len(bare["bare, once more"]), alike["p50"], alike["p99"]),
    ]
    rows += [(name, len(columns[name]), each["p50"], each["p99"]) for name, each in figures.items()]
    title = f"{RESNET}, {engine} ({words}): steps of a frame at {_STEPS_HZ:g} Hz"
    found.tables.append((title, ("", "frames", "p50 ms", "p99 ms"), rows))
    found.figures[engine] = {
        "ratios": ratios,
        "alike": alike,
        "frames": len(ours),
        "fresh": len(fresh),
        **figures,
    }
    found.targets += [
        Target(
            f"steps, {engine}: worker / bare, {key} (bare / bare {alike[key]:.2f})",
            ratio,
            "<=",
            _MOST_OF_BARE,
        )
        for key, ratio in ratios.items()
    ]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": math.nan, "p99": math.nan}
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


Ask = Callable[[float, bool], list[dict[str, float]]]


@contextmanager
def _bare(config: Mapping[str, Any]) -> Iterator[Ask]:
    """A process of `bare_steps`, asked for some seconds of frames, with or without marks; the first time it loads."""
    command = [sys.executable, "-m", "benchmarks.rig.cuda.bare_steps", "--config", json.dumps(config)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stdin, stdout = process.stdin, process.stdout
    assert stdin
    assert stdout

    def listen() -> dict[str, Any]:
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the bare process ended with {process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(seconds: float, marks: bool) -> list[dict[str, float]]:
        print(json.dumps({"seconds": seconds, "rate": _STEPS_HZ, "marks": marks}), file=stdin, flush=True)
        frames: list[dict[str, float]] = listen()["frames"]
        return frames

    try:
        yield ask
    finally:
        stdin.close()
        process.wait()
