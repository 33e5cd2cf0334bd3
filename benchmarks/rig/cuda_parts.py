"""The parts of `bench cuda`.

Each runs in a process of its own and gives tables and figures. Nothing here needs ROS.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.rig.bare_stage import BareStage
from benchmarks.rig.chains import measure_curve
from benchmarks.rig.cuda_adapter import NAMES
from benchmarks.rig.report import machine as describe_machine
from benchmarks.rig.report import say
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.engines.outputs import tensors_in
from torchperf_ros.engines.stopwatch import Timing, time_interleaved
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.settings.config import node_config
from torchperf_ros.stage.frame import Answer
from torchperf_ros.tools.tune.trial import TuneCandidate
from torchperf_ros.tools.tune.trial_run import Attempt, load_tier
from torchperf_ros.worker.capture import MemoryRecording, ProfileRecording
from torchperf_ros.workers.compile_process import CompileProcess

ROOT: Final = Path(__file__).resolve().parents[2]
TIERS: Final = CameraAdapter.tiers
CHAINS: Final = (1, 15, 30)
_CAMERA: Final = "torchperf_ros.models.camera:CameraAdapter"
_MIB: Final = 1 << 20
_THREADS: Final = 1
_PRECISIONS: Final = ("tf32", "fp16", "bf16")
_STARTS_WITHIN_S: Final = 120.0
_FRAME_EVERY_S: Final = 0.05
_CALM_FRAMES: Final = 10  # before each fault
_LEFT_FRAMES: Final = 60  # after it, at most
_LAYERS: Final = {"full": 8, "fast": 2}
_FAULTS: Final = ("out of memory", "segfault", "hang", "context lost")


@dataclass
class Found:
    """What a part found out.

    Attributes:
        tables: title, columns, rows.
        figures: the same by name, for JSON.
        wrong: what was not as it has to be; empty: all was.
    """

    tables: list[tuple[str, Sequence[str], list[Sequence[object]]]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Place:
    """Where a part runs, and how long it may time.

    Parts build side by side; whoever times does so alone.
    """

    def __init__(self, device: str, seconds: float, folder: Path) -> None:
        self.name, self.seconds, self.folder = device, seconds, folder
        self._turn = os.open(folder / "turn", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._turn, fcntl.LOCK_SH)

    def device(self) -> Device:
        """The device, taken as a worker takes it."""
        return Device(choose_device(self.name), _THREADS)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other part runs."""
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_SH)


def machine(place: Place) -> Found:
    """What this runs on."""
    device = place.device().device
    found = {**describe_machine(), "threads": _THREADS}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory // _MIB,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "integrated": bool(properties.is_integrated),
            "uuid": str(getattr(properties, "uuid", "")),
        }
    return Found([("Machine", ("", ""), [(key, str(value)) for key, value in found.items()])], found)


def engines(tier: str, options: Sequence[BuildOptions]) -> Callable[[Place], Found]:
    """Engines and precisions on one tier of the camera's detector, with parity, each in turns with eager fp32."""

    def run(place: Place) -> Found:
        with torch.inference_mode():
            model = load_tier(
                {"adapter": _CAMERA, "options": {}, "device": place.name, "tier": tier}, _THREADS
            )
            attempts, refused = {}, {}
            for each in options:
                say(f"building {each.label}")
                try:
                    attempts[each.label] = attempt = Attempt(
                        model, TuneCandidate(each, _THREADS), time.monotonic_ns()
                    )
                    attempt.compare()
                except (
                    Exception
                ) as error:  # the compiler's boundary: the others are measured, and this one is named
                    attempts.pop(each.label, None)
                    refused[each.label] = f"{type(error).__name__}: {error}".splitlines()[0]
            with place.alone():
                figures = {label: attempt.measure(place.seconds) for label, attempt in attempts.items()}
        rows: list[Sequence[object]] = [
            (
                label,
                f["p50_ms"],
                f["p99_ms"],
                f["eager_p50_ms"] / f["p50_ms"],
                f["compile_s"],
                f["relative_l2"],
            )
            for label, f in figures.items()
        ]
        columns = ("", "p50 ms", "p99 ms", "times eager", "compile s", "relative L2")
        tables = [(f"Camera, tier {tier}, one frame on the device", columns, rows)]
        wrong = [f"{label}: {why}" for label, why in refused.items()]
        return Found(tables, {**figures, "refused": refused}, wrong if model.device.type == "cuda" else [])

    return run


def copies(place: Place) -> Found:
    """Inputs and outputs by pageable memory, by way of page-locked memory, and from that."""
    device = place.device()
    adapter = CameraAdapter({}, device.device)
    image = torch.zeros(1080, 1920, 3, dtype=torch.uint8)
    messages = adapter.example_messages()
    on_cpu = CameraAdapter({}, torch.device("cpu"))
    pin = torch.Tensor.pin_memory if device.is_cuda else torch.Tensor.clone
    pinned = pin(image)
    with torch.inference_mode():
        model = adapter.build("fast").eval()
        host = tuple(tensor.cpu() for tensor in adapter.example_inputs("fast"))

        def frame(upload: Callable[[], tuple[torch.Tensor, ...]]) -> Callable[[], object]:
            return lambda: [tensor.cpu() for tensor in tensors_in(model(*upload()))]

        with place.alone():
            timings = time_interleaved(
                {
                    "detector, fast, up and down": frame(lambda: device.to_device(host)),
                    "detector, fast, up and down, by way of pinned": frame(
                        lambda: device.to_device(tuple(map(pin, host)))
                    ),
                    "preprocess of 1280x720 on the device": lambda: adapter.preprocess(messages),
                    "preprocess of 1280x720 on the CPU, and up": lambda: device.to_device(
                        on_cpu.preprocess(messages)
                    ),
                    "image 1920x1080 up": lambda: device.to_device((image,)),
                    "image 1920x1080 up, by way of pinned": lambda: device.to_device((pin(image),)),
                    "image 1920x1080 up, from pinned": lambda: device.to_device((pinned,)),
                },
                device.device,
                seconds=place.seconds,
            )
    return _timed("Copies", timings)


def streams(place: Place) -> Found:
    """A small model beside another stream that is never idle.

    On a stream of its priority, and on the worker's.
    """
    device = place.device()
    own, ordinary, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    adapter = CameraAdapter({}, device.device)
    with torch.inference_mode():
        model, inputs = adapter.build("fast").eval(), adapter.example_inputs("fast")
        big = torch.randn(2048, 2048, device=device.device)

        busy = torch.cuda.Event()

        def frame(stream: torch.cuda.Stream) -> Callable[[], object]:
            def run() -> object:
                if busy.query():  # else it would have more and more to do
                    with torch.cuda.stream(other):
                        for _ in range(20):
                            big @ big
                        busy.record()
                with torch.cuda.stream(stream):
                    outputs = model(*inputs)
                stream.synchronize()
                return outputs

            return run

        torch.cuda.synchronize()
        with place.alone():
            # Each call waits for its own stream; to wait for the whole device would be to wait for the
            # other stream.
            found = time_interleaved(
                {"priority 0": frame(ordinary), "the worker's, priority -1": frame(own)},
                torch.device("cpu"),
                seconds=place.seconds,
                inner=1,
            )
    torch.cuda.synchronize()
    return _timed("Detector, fast, beside matrix products on another stream, by its own stream", found)


def chain(length: int) -> Callable[[Place], Found]:
    """One point of the launch-bound curve."""

    def run(place: Place) -> Found:
        device = place.device().device
        with ExitStack() as stack:

            def step(text: str) -> None:
                say(text)
                if text.startswith("calibrating"):  # what is built before may be built beside others
                    stack.enter_context(place.alone())

            curve = measure_curve([length], device, seconds=place.seconds, on_step=step)
        rows = [
            (p.engine, p.runs, p.median_us, p.p99_us, p.times_eager, p.reference, p.compile_s, p.error)
            for p in curve
        ]
        columns = ("", "runs", "p50 us", "p99 us", "times eager", "published", "compile s", "error")
        wrong = [
            f"{p.engine} is slower than eager: {p.times_eager:.2f}"
            for p in curve
            if p.engine == "auto" and p.times_eager < 0.97
        ]
        points = {p.engine: asdict(p) for p in curve}
        return Found([(f"Chain of {length} small operations", columns, rows)], points, wrong)

    return run


def memory(place: Place) -> Found:
    """The allocator's history of some frames, and how long it takes to write."""
    device = place.device()
    adapter = CameraAdapter({}, device.device)
    folder = place.folder / "memory"
    folder.mkdir()
    with torch.inference_mode():
        model, inputs = adapter.build("full").eval(), adapter.example_inputs("full")
        recording = MemoryRecording(device.device, os.getpid(), window_s=0.0)
        recording.begin()
        kept = [model(*inputs) for _ in range(20)]
        started = time.perf_counter()
        summary = recording.finish(folder)
        took_s = time.perf_counter() - started
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    found = {
        "finish_s": took_s,
        "summary": summary,
        "files": files,
        "kept": len(kept),
        **device.memory_bytes(),
    }
    wanted = {"memory.md", *(("cuda_memory.pickle", "cuda_memory.txt") if device.is_cuda else ())}
    wrong = [f"{name} was not written" for name in sorted(wanted - set(files))]
    wrong += [f"writing took {took_s:.0f} s"] if took_s > 20 else []
    return Found(
        [("Memory history", ("", ""), [(key, str(value)) for key, value in found.items()])], found, wrong
    )


def profile(place: Place) -> Found:
    """The profiler's tables of some frames: they have to hold kernels."""
    device = place.device()
    adapter = CameraAdapter({}, device.device)
    folder = place.folder / "profile"
    folder.mkdir()
    with torch.inference_mode():
        model, inputs = adapter.build("fast").eval(), adapter.example_inputs("fast")
        recording = ProfileRecording("camera", device.device)
        recording.begin()
        while not recording.full:
            with torch.profiler.record_function("camera/fast"), torch.profiler.record_function("inference"):
                model(*inputs)
                if device.is_cuda:
                    torch.cuda.synchronize()
            recording.frame_done()
        summary = recording.finish(folder)
    kernels = "Self CUDA time total" in (folder / "profile.txt").read_text(encoding="utf-8")
    wrong = ["no kernels in the table"] if device.is_cuda and not kernels else []
    return Found([("Profile", ("", ""), [("summary", summary)])], {"summary": summary}, wrong)


class WorkerStage(BareStage):
    """A stage on a part's device."""

    def __init__(
        self, place: Place, adapter: str, options: Mapping[str, Any], **parameters: object
    ) -> None:
        values = {
            "adapter": adapter,
            "output": "path",
            "tiers": ["full", "fast"],
            "backup": "standby",
            "budget_ms": 1000.0 * _FRAME_EVERY_S,
            "hang_ms": 200.0,
            "max_frame_bytes": _MIB,
            "engine": "eager",
            **parameters,
        }
        node = {
            "stages": ["bench"],
            "device": place.name,
            "worker_threads": _THREADS,
            "cache_dir": str(place.folder / "cache"),
        }
        super().__init__(
            node_config(node, {"bench": values}), "bench", options, start_timeout_s=_STARTS_WITHIN_S
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
        seen, next_at = len(self.answers), time.monotonic() + _FRAME_EVERY_S
        self.offer(NAMES.index(fault) + 1 if fault else 0)
        with self.news:
            if not self.news.wait_for(lambda: len(self.answers) > seen, _STARTS_WITHIN_S):
                raise TimeoutError(f"a frame was not answered: {fault or 'no fault'}")
        time.sleep(max(0.0, next_at - time.monotonic()))
        return self.answers[seen]


def workers(place: Place) -> Found:
    """Frames that run out of memory, that end or hang who runs them, or cost them the device.

    Who answers, when.
    """
    stage = WorkerStage(place, "benchmarks.rig.cuda_adapter:CudaAdapter", {"layers": _LAYERS})
    rows: list[Sequence[object]] = []
    figures: dict[str, Any] = {}
    wrong = []
    try:
        figures["first_ready_s"] = stage.start()
        with place.alone():
            for fault in _FAULTS:
                if fault == "context lost" and place.name == "cpu":
                    continue
                calm = [stage.ask() for _ in range(_CALM_FRAMES)]
                began = time.monotonic()
                poisoned = stage.ask(fault)
                after: list[Answer] = []
                while len(after) < _LEFT_FRAMES and not (after and after[-1].outcome is Outcome.ON_TIME):
                    after.append(stage.ask())
                back_s = time.monotonic() - began
                not_fresh = sum(a.outcome is not Outcome.ON_TIME for a in (poisoned, *after))
                late_ms = max(a.lateness_ms for a in (poisoned, *after))
                inference = float(np.nanmedian([a.steps.inference_ms for a in calm]))
                figures[fault] = {
                    "outcome": poisoned.outcome.name,
                    "tier": poisoned.tier,
                    "not_fresh": not_fresh,
                    "back_s": back_s,
                    "late_ms": late_ms,
                    "inference_p50_ms": inference,
                    "reason": poisoned.reason.partition("\n")[0],
                }
                rows.append((fault, *figures[fault].values()))
                if not after or after[-1].outcome is not Outcome.ON_TIME:
                    wrong.append(f"{fault}: no fresh answer after it")
                if fault == "out of memory" and (not_fresh or poisoned.tier != 1):
                    wrong.append(f"{fault}: not answered by the lower tier: {poisoned.outcome.name}")
                stage.settle()
    finally:
        stage.actor.stop()
        figures["log"] = stage.logs[-50:]
    columns = (
        "frame that makes its worker",
        "outcome",
        "tier",
        "not fresh",
        "back s",
        "latest ms",
        "inference p50",
        "reason",
    )
    return Found([("Real workers with a standby, 20 Hz", columns, rows)], figures, wrong)


def start(place: Place) -> Found:
    """The first start with no package, and one from packages."""
    adapter, tiers = _CAMERA, ["full", "fast"]
    cache = place.folder / "cache"
    job = {
        "adapter": adapter,
        "options": {},
        "device": place.name,
        "threads": _THREADS,
        "tiers": tiers,
        "build": [BuildOptions("aoti").as_dict()] * len(tiers),
        "packages": [""] * len(tiers),
        "cache_dir": str(cache),
        "cache_mib": 4096,
    }
    began = time.monotonic()
    process = CompileProcess(job, background=False)
    said: list[dict[str, Any]] = []
    while (news := process.listen()) is not None:
        said += news
        time.sleep(0.05)
    built_s, ended = time.monotonic() - began, process.death_reason()
    process.close()
    failed = [f"{each['tier']}: {each['text']}" for each in said if each["kind"] == "failed"]
    if failed or not any(each["kind"] == "built" for each in said):
        raise RuntimeError("; ".join(failed) or ended)
    figures: dict[str, Any] = {"build_s": built_s}
    with place.alone():
        for engine in ("eager", "aoti"):
            stage = WorkerStage(place, adapter, {}, engine=engine, tiers=tiers, output="detections")
            try:
                figures[f"{engine}_ready_s"] = stage.start()
                figures[f"{engine}_tiers"] = [
                    {key: getattr(tier, key) for key in ("name", "engine", "why", "load_s")}
                    for worker in stage.actor.pool.workers[:1]
                    if worker is not None
                    for tier in worker.reported.tiers
                ]
            finally:
                stage.actor.stop()
    wrong = [
        f"tier {t['name']} runs in {t['engine']}: {t['why']}"
        for t in figures["aoti_tiers"]
        if t["engine"] != "aoti"
    ]
    rows = [(key, value) for key, value in figures.items() if isinstance(value, float)]
    return Found([("Start of the camera's stage, first worker ready", ("", "s"), rows)], figures, wrong)


def tests(*, own_processes: bool) -> Callable[[Place], Found]:
    """The tests marked `gpu`, of the files that have any, as others may need what is not installed here."""
    marked = [
        file
        for file in sorted(ROOT.glob("test/**/test_*.py"))
        if "mark.gpu" in file.read_text(encoding="utf-8")
    ]
    files = [str(file) for file in marked if (file.stem == "test_on_cuda") == own_processes]

    def run(place: Place) -> Found:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *files,
        ]
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        lines = done.stdout.strip().splitlines()
        last = lines[-1] if lines else ""
        bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        figures = {"status": done.returncode, "last": last, "bad": bad, "output": done.stdout[-20_000:]}
        wrong = [f"pytest ended with {done.returncode}: {last}"] if done.returncode else []
        return Found([("Tests marked gpu", ("",), [(last,), *((line,) for line in bad)])], figures, wrong)

    return run


def _timed(title: str, timings: Mapping[str, Timing]) -> Found:
    figures = {
        name: {"p50_ms": t.median_ms, "p99_ms": t.p99_ms, "samples": len(t.times_ms)}
        for name, t in timings.items()
    }
    rows = [(name, *values.values()) for name, values in figures.items()]
    return Found([(title, ("", "p50 ms", "p99 ms", "samples"), rows)], figures)


def _parts() -> dict[str, Callable[[Place], Found]]:
    plain = BuildOptions()
    reduced = [BuildOptions(precision=name) for name in _PRECISIONS]
    compiled = [
        BuildOptions("compile"),
        BuildOptions("aoti"),
        BuildOptions("aoti", precision="fp16"),
        BuildOptions("aoti", precision="tf32"),
        BuildOptions("aoti", channels_last=True),
    ]
    graphs = [
        BuildOptions(cuda_graphs=True),
        BuildOptions(precision="fp16", cuda_graphs=True),
        BuildOptions("aoti", cuda_graphs=True),
        BuildOptions("compile", mode="reduce-overhead"),
    ]
    return {
        "machine": machine,
        "workers": workers,
        "start": start,
        **{f"engines-{tier}": engines(tier, [plain, *reduced, *compiled]) for tier in TIERS[:1]},
        **{f"engines-{tier}": engines(tier, [plain, *reduced[1:2], *compiled[:2]]) for tier in TIERS[1:]},
        **{f"graphs-{tier}": engines(tier, [plain, *graphs]) for tier in (TIERS[0], TIERS[-1])},
        **{f"chain-{length}": chain(length) for length in CHAINS},
        "copies": copies,
        "streams": streams,
        "memory": memory,
        "profile": profile,
        "tests": tests(own_processes=False),
        "tests-on-cuda": tests(own_processes=True),
    }


PARTS: Final = _parts()
LAST: Final = frozenset({"tests", "tests-on-cuda"})  # once nothing is timed any more
CUDA_ONLY: Final = frozenset({*LAST, "streams", *(name for name in PARTS if name.startswith("graphs-"))})


def run_part(name: str, device: str, seconds: float, folder: Path) -> int:
    """Run one part in this process and write what it found to the shared folder."""
    found = PARTS[name](Place(device, seconds, folder))
    (folder / f"{name}.json").write_text(json.dumps(asdict(found), default=str), encoding="utf-8")
    return 0
