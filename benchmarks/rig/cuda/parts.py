"""The parts of `bench cuda`.

Each runs in a process of its own and gives tables and figures. None but `node` and `overhead` needs ROS.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np
import torch

from benchmarks.rig.chains import measure_curve
from benchmarks.rig.cuda.network_parts import network_part, tune_part
from benchmarks.rig.cuda.networks import LRASPP, RESNET, VIT
from benchmarks.rig.cuda.place import MIB, THREADS, Found, Place, timed
from benchmarks.rig.cuda.stages import WorkerStage, cameras, contexts, steps
from benchmarks.rig.report import Target, say
from benchmarks.rig.report import machine as describe_machine
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.engines.device import time_interleaved
from torchperf_ros.engines.outputs import tensors_in
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.stage.frame import Answer
from torchperf_ros.worker.capture import MemoryRecording, ProfileRecording
from torchperf_ros.workers.compile_process import CompileProcess

ROOT: Final = Path(__file__).resolve().parents[3]
_CAMERA: Final = "torchperf_ros.models.camera:CameraAdapter"
_CHAINS: Final = (1, 30)
_LEAST_TIMES_EAGER: Final = 0.97
_CALM_FRAMES: Final = 10  # before each fault
_LEFT_FRAMES: Final = 60  # after it, at most
_LAYERS: Final = {"full": 8, "fast": 2}
_FAULTS: Final = ("out of memory", "segfault", "hang", "context lost")
_TEST_ENDS: Final = {"PASSED", "FAILED", "ERROR", "SKIPPED"}
_MOST_TESTS_AT_ONCE: Final = 6
"""Each has a CUDA context of its own, and other parts build meanwhile."""
_LONG_TESTS: Final = ("test_tune", "test_on_cuda")  # they begin first


def machine(place: Place) -> Found:
    """What this runs on."""
    device = place.device().device
    found = {**describe_machine(), "threads": THREADS}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory // MIB,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "integrated": bool(properties.is_integrated),
            "uuid": str(getattr(properties, "uuid", "")),
        }
    return Found([("Machine", ("", ""), [(key, str(value)) for key, value in found.items()])], found)


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
    return timed("Copies", timings)


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
    return timed("Detector, fast, beside matrix products on another stream, by its own stream", found)


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
        targets = [
            Target(f"chain of {length}: auto, times eager", p.times_eager, ">=", _LEAST_TIMES_EAGER)
            for p in curve
            if p.engine == "auto"
        ]
        title, points = f"Chain of {length} small operations", {p.engine: asdict(p) for p in curve}
        return Found([(title, columns, rows)], points, targets=targets)

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
    wanted = {"memory.txt", *(("cuda_memory.pickle", "cuda_memory.txt") if device.is_cuda else ())}
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


def workers(place: Place) -> Found:
    """Frames that run out of memory, that end or hang who runs them, or cost them the device.

    Who answers, when.
    """
    stage = WorkerStage(place, "benchmarks.rig.cuda.adapter:CudaAdapter", {"layers": _LAYERS})
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
                place.keep(Found(figures=dict(figures), wrong=list(wrong)))
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
    adapter, tiers = _CAMERA, ["full"]
    cache = place.folder / "cache"
    job = {
        "adapter": adapter,
        "options": {},
        "device": place.name,
        "threads": THREADS,
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
        for engine in ("eager", "auto", "aoti"):
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


def tests(place: Place) -> Found:
    """The tests marked `gpu`, side by side, of the files that have any: others may need what is not installed here."""
    files = [
        str(file)
        for file in sorted(
            ROOT.glob("test/**/test_*.py"), key=lambda file: (file.stem not in _LONG_TESTS, file)
        )
        if "mark.gpu" in file.read_text(encoding="utf-8")
    ]
    at_once = min(_MOST_TESTS_AT_ONCE, len(os.sched_getaffinity(0)))
    report = place.folder / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-m",
        "gpu",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-n", str(at_once), "--dist", "worksteal", f"--junitxml={report}", *files]
    # What it prints goes to this part's log as it comes, and is there if the part is killed.
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines += [line.rstrip()] if line.strip() else []
            place.keep(tests_so_far(lines))
    status = process.returncode
    last = lines[-1] if lines else ""
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    took_s = {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", 0)) for case in cases}
    figures = {"status": status, "last": last, "bad": bad, "took_s": took_s}
    figures["output"] = "\n".join(lines)[-20_000:] if bad else ""
    wrong = [f"pytest ended with {status}: {last}", *bad] if status else []
    longest = sorted(took_s.items(), key=lambda each: -each[1])[:10]
    tables: list[tuple[str, Sequence[str], list[Sequence[object]]]] = [
        ("Tests marked gpu", ("",), [(last,), *((line,) for line in bad)]),
        ("Tests that took longest", ("", "s"), list(longest)),
    ]
    return Found(tables, figures, wrong)


def tests_so_far(lines: Sequence[str]) -> Found:
    """How tests have ended, while others run: pytest's lines of several processes."""
    words = [line.split()[-2:] for line in lines if line.startswith("[gw")]
    ended = {each[-1]: each[0] for each in words if each[0] in _TEST_ENDS}
    bad = [f"{how} {name}" for name, how in ended.items() if how in {"FAILED", "ERROR"}]
    return Found(figures={"ended": ended}, wrong=bad)


def node(place: Place) -> Found:
    """The node under faults beside a naive one, as `./run bench deadline` has them."""
    return _of_ros(place, "deadline", "--seconds", "14", "--slice", "14", "--beside", "naive")


def overhead(place: Place) -> Found:
    """What the node adds to a model, as `./run bench overhead` has it."""
    return _of_ros(place, "overhead", "--seconds", "10", "--sizes", "1280x720")


def _of_ros(place: Place, benchmark: str, *arguments: str) -> Found:
    """Another benchmark's figures and targets; its tables go to this part's log."""
    file = place.folder / f"ros-{benchmark}.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", str(file), *arguments]
    with place.alone():
        done = subprocess.run(
            [*command, "--device", "cuda" if place.is_cuda else "cpu"], cwd=ROOT, check=False
        )
    if not file.exists():
        raise RuntimeError(f"bench {benchmark} ended with {done.returncode} and wrote no JSON")
    said = json.loads(file.read_text(encoding="utf-8"))
    targets = [
        Target(f"{benchmark}: {what}", math.nan if value is None else value, *limits)
        for what, value, *limits in (
            [each[key] for key in ("what", "value", "relation", "limit", "unit")]
            for each in said["targets"]
        )
    ]
    return Found(figures=said["figures"], targets=targets)


def _parts() -> dict[str, Callable[[Place], Found]]:
    networks = {RESNET: "resnet50", LRASPP: "lraspp", VIT: "vit"}
    return {
        "machine": machine,
        **{short: network_part(name, half=False) for name, short in networks.items()},
        **{f"{short}-fp16": network_part(name, half=True) for name, short in networks.items()},
        "start": start,
        **{f"chain-{length}": chain(length) for length in _CHAINS},
        "tests": tests,
        "steps": steps,
        "node": node,
        "overhead": overhead,
        "cameras": partial(cameras, precision="fp16"),
        "cameras-fp32": partial(cameras, precision="fp32"),
        "contexts": contexts,
        "workers": workers,
        "copies": copies,
        "streams": streams,
        "memory": memory,
        "profile": profile,
        **{f"tune-{short}": tune_part(name) for name, short in networks.items() if name != VIT},
    }


PARTS: Final = _parts()
GROUPS: Final = {
    "networks": [name for name in PARTS if name.partition("-")[0] in {"resnet50", "lraspp", "vit"}],
    "tune": [name for name in PARTS if name.startswith("tune-")],
}
"""Names that stand for several parts."""
ROS_ONLY: Final = ("node", "overhead")
CUDA_ONLY: Final = frozenset({"tests", "streams", "cameras-fp32", *GROUPS["networks"][1:]})
"""Parts that a CPU cannot run, or not within minutes."""


@dataclass(frozen=True)
class Phase:
    """Parts in the order in which they begin.

    Attributes:
        at_once: how many run side by side.
    """

    parts: Sequence[str]
    at_once: int = 1


_FIRST: Final = ("machine", "steps", "contexts")
"""Short ones that have to be alone, and were never measured on a quiet machine."""
_BUILDING: Final = ("tests", "vit", "resnet50-fp16", "lraspp-fp16", "lraspp", "resnet50", "vit-fp16")
"""All at once: one that times waits for those that build, and would wait once more for each that came later."""
_ALONE: Final = ("cameras", "tune-lraspp", "node", "overhead", "workers")
"""Longer ones, one after the other: the time may end between any two."""
_LAST: Final = (
    "start",
    "tune-resnet50",
    *(f"chain-{length}" for length in _CHAINS),
    "copies",
    "streams",
    "memory",
    "profile",
    "cameras-fp32",
)
"""What has been measured before, or takes a minute for one figure."""
PHASES: Final = (
    Phase(_FIRST),
    Phase(_BUILDING, at_once=len(_BUILDING)),
    Phase((*_ALONE, *_LAST)),
)


_LEAST_S: Final = {
    **dict.fromkeys(GROUPS["tune"], 90.0),
    **dict.fromkeys(GROUPS["networks"], 30.0),
    **dict.fromkeys([*ROS_ONLY, "cameras"], 60.0),
}
_MOST_S: Final = {"tests": 150.0}  # one test that hangs would have all wait that time


def least_s(name: str, device: str) -> float:
    """Seconds without which a part shows nothing on a GPU, so that it does not begin."""
    return 0.0 if device == "cpu" else _LEAST_S.get(name, 0.0)


def most_s(name: str, device: str) -> float:
    """Seconds after which a part is ended on a GPU, so that others can time."""
    return math.inf if device == "cpu" else _MOST_S.get(name, math.inf)


def usual() -> list[str]:
    """All parts but those that run only if named, or need ROS where there is none."""
    left_out = {"cameras-fp32", *(() if importlib.util.find_spec("rclpy") else ROS_ONLY)}
    return [name for name in PARTS if name not in left_out]


def run_part(name: str, device: str, seconds: float, folder: Path) -> int:
    """Run one part in this process and write what it found to the shared folder."""
    place = Place(device, seconds, folder, name)
    place.keep(PARTS[name](place))
    return 0
