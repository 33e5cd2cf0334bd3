"""The node's parameters about signed plans: which vehicle this is, and whose plans it follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.settings.parameter import check_all, declared, param, require


@dataclass(frozen=True)
class RolloutOptions:
    """Parameters `rollout.NAME` of the node.

    The plan itself is a parameter of the stage, `STAGE.rollout_plan`.
    """

    vehicle: str = param("", "Id of the vehicle, which never changes; plans draw by it.")
    key: str = param("", "File of the public key of the plans' owner.")
    facts: tuple[str, ...] = param(
        [""], "More that plans ask about, NAME=VALUE, such as region=north; '': none.", live=True
    )

    @property
    def more(self) -> dict[str, str]:
        return dict(fact.split("=", 1) for fact in self.facts)


_PARAMETERS, _PREFIX = declared(RolloutOptions), "rollout."


def rollout_options(values: Mapping[str, Any]) -> RolloutOptions:
    """Check the values `rollout.NAME` together; missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    found = check_all(_PARAMETERS, values, "", _PREFIX)
    facts = tuple(filter(None, found["facts"]))
    for fact in facts:
        name, equals, _ = fact.partition("=")
        require(name and equals, f"{_PREFIX}facts: {fact!r} is not allowed; it has to be NAME=VALUE")
    return RolloutOptions(**{**found, "facts": facts})
