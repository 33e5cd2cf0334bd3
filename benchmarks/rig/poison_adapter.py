"""The bench model, with faults that follow a frame.

The image's first byte names what happens to whoever runs it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.rig.bench_adapter import BenchAdapter
from benchmarks.rig.poison_faults import FAULTS, OBSERVE, OUTPUTS, POSTPROCESS, PREPROCESS, obey_limit
from torchperf_ros.api.adapter import Received

obey_limit()


class PoisonAdapter(BenchAdapter):
    def observe(self, messages: Mapping[str, Received]) -> None:
        """Fall victim to faults in `observe`."""
        OBSERVE.get(_fault(messages), bool)()

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        PREPROCESS.get(_fault(messages), bool)()
        return super().preprocess(messages)

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:
        fault = _fault(messages)
        POSTPROCESS.get(fault, bool)()
        if fault in OUTPUTS:
            return OUTPUTS[fault](messages["image"].stamp_ns)
        return super().postprocess(outputs, messages)


def _fault(messages: Mapping[str, Received]) -> str:
    first = int(messages["image"].message.data[0])
    return FAULTS[first - 1] if 0 < first <= len(FAULTS) else ""
