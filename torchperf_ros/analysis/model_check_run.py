"""One run of `torchperf check-model`: finds the stage, builds its model, checks it, and shows what came out."""

import json
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from torchperf_ros.analysis.checklist_table import show_checklist
from torchperf_ros.analysis.machine import describe_machine
from torchperf_ros.analysis.model_checklist import Checklist, ModelCheck
from torchperf_ros.analysis.model_variants import ModelVariants
from torchperf_ros.analysis.parameter_snippet import parameter_snippet
from torchperf_ros.core.config import NodeConfig, StageConfig, node_config, stage_config
from torchperf_ros.core.errors import AdapterError, ConfigError
from torchperf_ros.core.parameter_tables import STAGE_DEFAULTS
from torchperf_ros.core.params_file import read_params_file
from torchperf_ros.worker.adapter import Adapter, load_adapter
from torchperf_ros.worker.device import Device, choose_device

_OWN_STAGE = "model"


@dataclass(frozen=True)
class Request:
    """What the user asked for; None: the default. See the command's help."""

    adapter: str | None
    tier: str | None
    options: str | None
    params: Path | None
    stage: str | None
    device: str | None
    seconds: float
    compiled: bool


def run_check(request: Request, console: Console, json_file: Path | None) -> None:
    """Check, show the table on the console, and write the figures.

    Raises:
        ConfigError: an argument or a parameter is not allowed.
        AdapterError: the adapter cannot be loaded, built or run.
        OSError: the file cannot be written.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    node, stage = find_stage(request)
    tier = _tier_index(request, stage)
    device = Device(choose_device(request.device or node.device), node.worker_threads)
    checklist = _check(request, stage, tier, device, console)
    machine = describe_machine(device.device, torch.get_num_threads())
    snippet = ""
    if checklist.changes:
        snippet = parameter_snippet(stage, tier, checklist.changes, complete=request.params is None)
    show_checklist(checklist, f"{stage.adapter}, tier {stage.tiers[tier]}", machine, snippet, console)
    if json_file is not None:
        report = {
            "adapter": stage.adapter, "options": stage.options, "stage": stage.name, "tier": stage.tiers[tier],
            "machine": machine, **checklist.as_dict(), "yaml": snippet,
        }  # fmt: skip
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def find_stage(request: Request) -> tuple[NodeConfig, StageConfig]:
    """The node's and the stage's parameters: of the file, or the defaults with the adapter that was named.

    Raises:
        ConfigError: there is no such stage, or what was named does not fit together.
    """
    if request.params is None:
        if request.adapter is None or request.stage is not None:
            msg = (
                "--stage names a stage of --params FILE"
                if request.stage
                else "--adapter M:C or --params FILE is needed"
            )
            raise ConfigError(msg)
        return node_config({}, {}), _default_stage(request)
    node = read_params_file(request.params)
    named = [stage for stage in node.stages if request.stage in (None, stage.name)]
    found = [stage for stage in named if request.adapter in (None, stage.adapter)]
    if len(found) != 1:
        known = ", ".join(f"{stage.name} ({stage.adapter})" for stage in node.stages)
        asked = f"--stage {request.stage or '(none)'}, --adapter {request.adapter or '(none)'}"
        msg = f"{asked}: {len(found)} stages of {request.params} fit; it has to be one of {known}"
        raise ConfigError(msg)
    stage = found[0]
    return node, stage if request.options is None else replace(stage, options=_options(request, stage.name))


def _default_stage(request: Request) -> StageConfig:
    assert request.adapter is not None
    values: dict[str, Any] = {} if request.options is None else {"options": request.options}
    for name, defaults in STAGE_DEFAULTS.items():
        if defaults["adapter"] == request.adapter:
            return stage_config(name, values)
    values |= {"adapter": request.adapter, "output": _OWN_STAGE}
    tiers = [request.tier] if request.tier else list(getattr(load_adapter(request.adapter), "tiers", ()))
    return stage_config(_OWN_STAGE, values | ({"tiers": tiers} if tiers else {}))


def _options(request: Request, name: str) -> dict[str, Any]:
    assert request.options is not None
    return stage_config(name, {"adapter": "m:C", "output": "o", "options": request.options}).options


def _tier_index(request: Request, stage: StageConfig) -> int:
    if request.tier is not None and request.tier not in stage.tiers:
        msg = f"--tier {request.tier!r} does not exist; it has to be one of {', '.join(stage.tiers)}"
        raise ConfigError(msg)
    return 0 if request.tier is None else stage.tiers.index(request.tier)


def _check(request: Request, stage: StageConfig, tier: int, device: Device, console: Console) -> Checklist:
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(Text(f"{time.monotonic() - started:5.0f} s  {text}", style="dim"), soft_wrap=True)

    adapter, model = _build(stage, stage.tiers[tier], device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of how it uses itself while it exports
        warnings.simplefilter("ignore", DeprecationWarning)
        with torch.inference_mode():
            variants = ModelVariants(
                model, adapter.example_inputs(stage.tiers[tier]), adapter.dynamic_dims(), device, say
            )
            now = stage.build_options(tier)
            return ModelCheck(variants, now, seconds=request.seconds, compiled=request.compiled, say=say).run()


def _build(stage: StageConfig, tier: str, device: Device) -> tuple[Adapter, torch.nn.Module]:
    made = load_adapter(stage.adapter)
    try:
        adapter = made(stage.options, device.device)
        model = adapter.build(tier)
    except ConfigError:
        raise
    except Exception as error:
        # The user's adapter runs here: whatever it raises is the reason why there is no model.
        msg = f"adapter {stage.adapter!r}: building tier {tier!r} failed: {type(error).__name__}: {error}"
        raise AdapterError(msg) from error
    if not isinstance(model, torch.nn.Module):
        msg = f"adapter {stage.adapter!r}: build({tier!r}) gave a {type(model).__name__}, not a torch.nn.Module"
        raise AdapterError(msg)
    return adapter, model.eval().to(device.device)
