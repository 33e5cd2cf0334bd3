"""Which tiers an adapter has, where nobody names them."""

from torchperf_ros.config.config import STAGE_PARAMETERS
from torchperf_ros.engines.built_tier import build_model
from torchperf_ros.engines.fingerprint import structure_hash
from torchperf_ros.frame.errors import AdapterError
from torchperf_ros.model.adapter import Adapter

_USUAL: tuple[str, ...] = tuple(next(one.default for one in STAGE_PARAMETERS if one.name == "tiers"))


def tiers_of(adapter: Adapter) -> tuple[str, ...]:
    """Those of the node's default tiers that it builds; of several with one and the same model, the first.

    Raises:
        AdapterError: it builds none of them.
    """
    found: dict[str, str] = {}
    reason = ""
    for tier in _USUAL:
        try:
            found.setdefault(structure_hash(build_model(adapter, tier)), tier)
        except Exception as error:  # the user's code: a tier that it does not have may raise anything
            reason = reason or f"{type(error).__name__}: {error}"
    if not found:
        raise AdapterError(
            f"{type(adapter).__name__} builds none of the tiers {', '.join(_USUAL)} ({reason}); name its own, most"
            " accurate first"
        )
    return tuple(found.values())
