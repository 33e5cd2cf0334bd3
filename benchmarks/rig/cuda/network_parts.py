"""Parts `NETWORK` and `NETWORK-fp16`: what engine auto runs, at first and when all is built, beside torch by hand.

Part `tune-NETWORK`: what `torchperf tune --minutes 1` finds, beside the same.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.rig.cuda.build_times import BuildTimes, build_times
from benchmarks.rig.cuda.by_hand import FP16, FP32, TF32, Candidate, best_of, by_hand
from benchmarks.rig.cuda.networks import ADAPTER, NetworkAdapter
from benchmarks.rig.cuda.place import THREADS, Found, Place
from benchmarks.rig.report import Target, say
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.device import Device, Timing, time_interleaved
from torchperf_ros.engines.package import make_runner
from torchperf_ros.engines.package_build import do_job
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.worker.tier import Tier
from torchperf_ros.worker.tier_loader import TierLoader
from torchperf_ros.workers.worker_setup import WorkerSetup

TIER: Final = "full"
_FIRST, _BUILT = "auto, at first", "auto, when built"
_IN_WORKER: Final = ", as a worker runs it"
_CACHE_MIB: Final = 8192
_MOST_AT_FIRST, _MOST_BUILT, _MOST_TUNED = 1.1, 1.03, 1.05
_FIRST_BETTER_S: Final = 15.0
_ROUNDS: Final = (20, 1000)
_LEAST_GAIN: Final = 0.97
"""Of eager's p50: what takes less is better than eager."""
_TUNE_SECONDS: Final = 1.0
_LOOKS_EVERY_S: Final = 0.1
_TORCHPERF: Final = "from torchperf_ros.tools.main import app; app()"
_TUNED: Final = "tuned"
_COLUMNS: Final = ("", "p50 ms", "p99 ms", "of the best by hand", "made in s", "what it is")


def network_part(name: str, *, half: bool) -> Callable[[Place], Found]:
    """One network in one precision: all in turns, in one process."""

    def run(place: Place) -> Found:
        device = place.device()
        options = {"network": name, "small": not place.is_cuda}
        build = BuildOptions("auto", precision="fp16", channels_last=True) if half else BuildOptions("auto")
        if not place.is_cuda and half:
            build = BuildOptions("auto", precision="bf16")
        adapter = NetworkAdapter(options, device.device)
        image = adapter.example_inputs(TIER)[0]
        model = adapter.build(TIER)
        cache = place.folder / f"cache-{name}-{half}"
        found, loads = Found(), dict[str, Tier]()
        with torch.inference_mode():
            loads[_FIRST] = _load(options, build, device, cache)
            wanted = [FP16] if half else [FP32, TF32, FP16] if place.is_cuda else [FP32]
            if not place.is_cuda and half:
                wanted = [FP32]
            compiles = wanted[:1] if place.is_cuda else []
            candidates, refused = by_hand(model, image, wanted, compiles=compiles)
            title = f"{name}{', fp16 channels last' if half else ''}"
            first = _at_first(place, device, title, wanted[0], candidates, loads, image)
        stream = torch.cuda.current_stream() if place.is_cuda else None
        _build(place, options, build, cache, found, first)
        if stream is not None:
            # The build has taken the device as a process of its own does, with a stream of its own.
            torch.cuda.set_stream(stream)
        with torch.inference_mode():
            loads[_BUILT] = _load(options, build, device, cache)
            with place.alone():
                timings = _in_turns(device, candidates, loads, image, place.seconds)
        _tell(
            f"{name}{', fp16 channels last' if half else ''}", wanted[0], timings, candidates, loads, found
        )
        found.figures["refused"] = refused
        found.wrong += [f"{each}: {why}" for each, why in refused.items()]
        return found

    return run


def _at_first(
    place: Place,
    device: Device,
    title: str,
    precision: str,
    candidates: Mapping[str, Candidate],
    loads: Mapping[str, Tier],
    image: torch.Tensor,
) -> Found:
    """What is measured before the build, and kept, as that may take too long."""
    candidates = {key: one for key, one in candidates.items() if one.precision == precision}
    with place.beside_builds():  # shortly: the others wait for it
        timings = _in_turns(device, candidates, loads, image, place.seconds / 2)
    found = Found(wrong=["the build did not come to its end"])
    _tell(f"{title}; before the build, while others build", precision, timings, candidates, loads, found)
    place.keep(found)
    return found


def _load(options: Mapping[str, Any], build: BuildOptions, device: Device, cache: Path) -> Tier:
    """The tier as a worker loads it, from what lies in the cache."""
    setup = WorkerSetup(
        "bench",
        ADAPTER,
        dict(options),
        (TIER,),
        (build,),
        ("",),
        (0,),
        (-1,),
        device=str(device.device),
        threads=THREADS,
        cache_dir=str(cache),
        cache_mib=_CACHE_MIB,
    )
    adapter = NetworkAdapter(dict(options), device.device)
    tier = TierLoader(adapter, setup, device, say).load(0)
    say(f"loaded in {tier.facts.load_s:.2f} s: {tier.facts.engine} {tier.facts.choice or tier.facts.why}")
    return tier


def _build(
    place: Place,
    options: Mapping[str, Any],
    build: BuildOptions,
    cache: Path,
    found: Found,
    first: Found,
) -> None:
    """Build all that engine auto chooses from; its own choice is timed alone.

    After each step that is kept, with what was found `first`.
    """
    job = {
        "adapter": ADAPTER,
        "options": dict(options),
        "device": place.name,
        "threads": THREADS,
        "tiers": [TIER],
        "build": [build.as_dict()],
        "packages": [""],
        "cache_dir": str(cache),
        "cache_mib": _CACHE_MIB,
    }
    said: list[dict[str, Any]] = []
    alone_s, began, began_cpu_s = 0.0, time.monotonic(), _cpu_s()

    def keep(times: BuildTimes) -> None:
        so_far = replace(first, tables=list(first.tables), figures=dict(first.figures))
        _tell_build(times, time.monotonic() - began, _cpu_s() - began_cpu_s, so_far)
        place.keep(so_far)

    with ExitStack() as stack, build_times(keep) as times:

        def news(kind: str, **fields: Any) -> None:
            nonlocal alone_s
            said.append({"kind": kind, **fields})
            say(f"{kind} {fields.get('step', fields.get('text', ''))}")
            if str(fields.get("step", "")).startswith("choosing"):
                waits = time.monotonic()
                stack.enter_context(place.alone())
                alone_s = time.monotonic() - waits

        do_job(job, news)
        whole_s = time.monotonic() - began - alone_s
    found.wrong += [f"build: {each['text']}" for each in said if each["kind"] == "failed"]
    _tell_build(times, whole_s, _cpu_s() - began_cpu_s, found)


def _cpu_s() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _tell_build(times: BuildTimes, whole_s: float, cpu_s: float, found: Found) -> None:
    found.figures["build"] = {
        "seconds": whole_s,
        "cpu_s": cpu_s,
        "steps": {step: {"calls": calls, "s": took_s} for step, calls, took_s, _ in times.rows(whole_s)},
        "torch": times.torchs,
    }
    rows = [
        ("all", 1, whole_s, 1.0),
        ("all, seconds of a processor", 1, cpu_s, math.nan),
        *times.rows(whole_s),
    ]
    found.tables.append(
        ("Where the build's seconds go, steps within steps", ("", "calls", "s", "share"), rows)
    )


def _in_turns(
    device: Device,
    candidates: Mapping[str, Candidate],
    loads: Mapping[str, Tier],
    image: torch.Tensor,
    seconds: float,
) -> dict[str, Timing]:
    calls: dict[str, Callable[[], object]] = {name: one.call for name, one in candidates.items()}
    for name, tier in loads.items():
        calls[name] = partial(tier.call_for((image,)), image)
        calls[f"{name}{_IN_WORKER}"] = partial(tier.run, (image,))
    return time_interleaved(calls, device.device, seconds=seconds, rounds=_ROUNDS, inner=1)


def _tell(
    title: str,
    precision: str,
    timings: Mapping[str, Timing],
    candidates: Mapping[str, Candidate],
    loads: Mapping[str, Tier],
    found: Found,
) -> None:
    """The table, the figures, and what of it is wrong."""
    p50_ms = {name: one.median_ms for name, one in timings.items()}
    best = best_of(p50_ms, candidates, precision)
    rows: list[Sequence[object]] = []
    for name, timing in timings.items():
        if name in candidates:
            own, made_s, words = candidates[name].precision, candidates[name].made_s, ""
        elif name.endswith(_IN_WORKER):
            own, made_s, words = precision, math.nan, "timed, and on CUDA its outputs summed for NaN"
        else:
            facts = loads[name].facts
            own, made_s = precision, facts.load_s
            words = " ".join(filter(None, [facts.engine, facts.choice, facts.why]))
        ratio = p50_ms[name] / p50_ms[best_of(p50_ms, candidates, own)]
        rows.append((name, timing.median_ms, timing.p99_ms, ratio, made_s, words))
        found.figures[name] = {
            "p50_ms": timing.median_ms,
            "p99_ms": timing.p99_ms,
            "of_best_by_hand": ratio,
            "made_s": made_s,
            "what": words,
        }
    rows.sort(key=lambda row: float(str(row[1])))
    found.tables.insert(0, (f"{title}: one image on the device", _COLUMNS, rows))
    for name, most in ((_FIRST, _MOST_AT_FIRST), (_BUILT, _MOST_BUILT)):
        if name in loads:
            ratio = found.figures[name]["of_best_by_hand"]
            found.targets.append(Target(f"{title}: {name} / {best}", ratio, "<=", most))


def tune_part(name: str) -> Callable[[Place], Found]:
    """`torchperf tune --minutes 1`, as a user calls it, and its best in turns with what is best by hand."""

    def run(place: Place) -> Found:
        options = {"network": name, "small": not place.is_cuda}
        minutes = 1.0 if place.is_cuda else max(0.3, place.seconds)
        with place.alone():
            said, took_s, stood_s = _tune(place, options, minutes)
        return _compare_tuned(place, name, options, said, took_s, stood_s)

    return run


def _tune(
    place: Place, options: Mapping[str, Any], minutes: float
) -> tuple[dict[str, Any], float, dict[str, float]]:
    """What the command wrote, the seconds that it took, and after how many each candidate stood."""
    name = str(options["network"])
    file, cache = place.folder / f"tuned-{name}.json", place.folder / f"tune-cache-{name}"
    parameters = place.folder / f"tune-{name}.yaml"
    stage = {"adapter": ADAPTER, "output": "path", "tiers": [TIER], "options": json.dumps(options)}
    node = {"stages": ["bench"], "device": place.name, "cache_dir": str(cache), "bench": stage}
    parameters.write_text(json.dumps({"/**": {"ros__parameters": node}}), encoding="utf-8")
    command = [sys.executable, "-c", _TORCHPERF, "tune", "bench"]
    command += ["--params", str(parameters), "--minutes", str(minutes), "--seconds", str(_TUNE_SECONDS)]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--json", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stood_s: dict[str, float] = {}
    while process.poll() is None:
        time.sleep(_LOOKS_EVERY_S)
        for label in _tried(cache):
            stood_s.setdefault(label, time.monotonic() - began)
    took_s = time.monotonic() - began
    printed = process.stdout.read() if process.stdout else ""
    print(printed)
    if not file.exists():
        last = printed.strip().splitlines()[-1:] or ["nothing"]
        raise RuntimeError(
            f"tune ended with {process.returncode} and wrote no JSON; it printed last: {last[0]}"
        )
    return json.loads(file.read_text(encoding="utf-8")), took_s, stood_s


def _tried(cache: Path) -> Iterator[str]:
    """Candidates that are in the file of trials."""
    for file in cache.glob("tune/*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, LookupError):  # it is being written
                yield _key(json.loads(line)["trial"])


def _key(trial: Mapping[str, Any]) -> str:
    return json.dumps(trial["candidate"], sort_keys=True)


def _is_better(trial: Mapping[str, Any]) -> bool:
    """Whether it was faster than eager beside it."""
    figures = trial["figures"]
    return bool(figures and figures["p50_ms"] < _LEAST_GAIN * figures["eager_p50_ms"])


def _compare_tuned(
    place: Place,
    name: str,
    options: Mapping[str, Any],
    said: Mapping[str, Any],
    took_s: float,
    stood_s: Mapping[str, float],
) -> Found:
    ranking = said["tiers"][TIER]["ranking"]
    best = next((one for one in ranking if one["group"] in {"fits", "over_budget"}), None)
    ranking = sorted(ranking, key=lambda one: stood_s.get(_key(one), math.inf))
    first_s = next((stood_s.get(_key(one), math.inf) for one in ranking if _is_better(one)), math.inf)
    found = Found(figures={"seconds": took_s, "first_better_s": first_s, "tried": len(ranking)})
    if best is None:
        found.wrong.append("tune: nothing could be used")
        return found
    tuned = BuildOptions(**best["candidate"]["options"])
    device = place.device()
    adapter = NetworkAdapter(dict(options), device.device)
    image = adapter.example_inputs(TIER)[0]
    wanted = [FP32, TF32, FP16] if place.is_cuda else [FP32]
    model = adapter.build(TIER)
    with torch.inference_mode():
        compiles = [FP16] if place.is_cuda else []
        candidates, refused = by_hand(model, image, wanted, compiles=compiles)
        say(f"building {tuned.label}")
        runner = make_runner(BuiltTier(model, (image,), {}, device.device), tuned)
        calls = {each: one.call for each, one in candidates.items()} | {_TUNED: partial(runner.call, image)}
        with place.alone():
            timings = time_interleaved(calls, device.device, seconds=place.seconds, rounds=_ROUNDS, inner=1)
    p50_ms = {each: one.median_ms for each, one in timings.items()}
    of_all = min((each for each in p50_ms if each in candidates), key=lambda each: p50_ms[each])
    rows: list[Sequence[object]] = [
        (each, ms, timings[each].p99_ms, ms / p50_ms[of_all], tuned.label if each == _TUNED else "")
        for each, ms in sorted(p50_ms.items(), key=lambda each: each[1])
    ]
    columns = ("", "p50 ms", "p99 ms", "of the best by hand", "what it is")
    title = (
        f"{name}: tune, {len(ranking)} tried in {took_s:.0f} s, one better than eager after {first_s:.1f} s"
    )
    found.tables.append((title, columns, rows))
    tried = [
        (
            one["candidate"]["options"]["engine"],
            BuildOptions(**one["candidate"]["options"]).label,
            one["p50_ms"],
            stood_s.get(_key(one), math.nan),
            one["took_s"],
            one["figures"]["cold_start_s"] if one["figures"] else math.nan,
            one["why"],
        )
        for one in ranking
    ]
    columns = ("engine", "candidate", "p50 ms", "stands after s", "took s", "start s", "why not")
    found.tables.append((f"{name}: what tune tried", columns, tried))
    ratio = p50_ms[_TUNED] / p50_ms[of_all]
    found.figures |= {
        "p50_ms": p50_ms,
        "best": tuned.label,
        "of_best_by_hand": ratio,
        "refused": refused,
    }
    found.targets += [
        Target(f"{name}: tune's best, {tuned.label} / {of_all}", ratio, "<=", _MOST_TUNED),
        Target(f"{name}: tune, first better than eager after", first_s, "<=", _FIRST_BETTER_S, "s"),
    ]
    return found
