"""Parameters to change, as the YAML file that the node takes."""

import json
from collections.abc import Mapping
from typing import Any

from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.parameter_tables import NODE_PARAMETERS, STAGE_DEFAULTS

_NODE_NAMES = {parameter.name for parameter in NODE_PARAMETERS}
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", ""}


def parameter_snippet(stage: StageConfig, tier: int, changes: Mapping[str, Any], *, complete: bool) -> str:
    """A parameter file with what changes, to be given after the one that is used now.

    Args:
        stage: as it is now.
        tier: index of the tier that the changes are for; other tiers keep their precision.
        changes: parameter -> value for this tier.
        complete: whether to say what the stage is, too, where no file says so and the node does not know it.
    """
    values: dict[str, Any] = {}
    node = {name: value for name, value in changes.items() if name in _NODE_NAMES}
    if complete and stage.name not in STAGE_DEFAULTS:
        node = {"stages": [stage.name], **node}
        values = {"adapter": stage.adapter, "options": json.dumps(stage.options), "output": stage.output,
                  "tiers": stage.tiers}  # fmt: skip
    values |= {name: value for name, value in changes.items() if name not in _NODE_NAMES}
    if "precision" in changes:
        precision = [*stage.precision]
        precision[tier] = changes["precision"]
        values["precision"] = precision
    lines = ["/**/perf:", "  ros__parameters:"]
    lines += [f"    {name}: {yaml_value(value)}" for name, value in node.items()]
    if values:
        lines += [f"    {stage.name}:", *(f"      {name}: {yaml_value(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def yaml_value(value: Any) -> str:  # noqa: ANN401 - the value of any parameter
    """A parameter's value in YAML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, (int, float)):
        return str(value)
    text = str(value)
    plain = text.replace("_", "").isalnum() and text[:1].isalpha() and text.lower() not in _RESERVED
    return text if plain else "'" + text.replace("'", "''") + "'"
