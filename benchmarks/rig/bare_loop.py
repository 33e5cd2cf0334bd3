"""The adapter's steps in a bare loop: no ROS, no node, no deadline; what a worker is compared with.

Reads one JSON object per line from standard input, `{"seconds": 5, "rate": 30, "size": "1280x720"}`, runs
the adapter's first tier on an image of that size at that pace, and answers with one line: the milliseconds
of each run, from the message's bytes to the output's.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

from benchmarks.rig.messages import scene_cdr
from torchperf_ros.api.adapter import Received, load_adapter
from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.messages import decode, encode
from torchperf_ros.engines.device import Device, choose_device


class BareLoop:
    """One adapter and its first tier, in this process."""

    def __init__(self, adapter: str, options: dict[str, Any], tier: str, device: str = "cpu") -> None:
        """Build the model as a worker does: on one thread, on CUDA in fp32, which is not torch's default there."""
        self._adapter = load_adapter(adapter)(options, Device(choose_device(device), 1).device)
        self._model = self._adapter.build(tier).eval()
        ((self._topic, self._type),) = self._adapter.inputs.items()

    def run(self, seconds: float, rate: float, size: str) -> list[float]:
        cdr = scene_cdr(*(int(word) for word in size.split("x")))
        took_ms = []
        due_s = time.monotonic()
        for _ in range(round(seconds * rate)):
            data = restamped(cdr, time.time_ns())
            due_s += 1 / rate
            time.sleep(max(0.0, due_s - time.monotonic()))
            started_ns = time.perf_counter_ns()
            messages = {self._topic: Received(decode(data, self._type), 0, 0.0)}
            outputs = self._model(*self._adapter.preprocess(messages))
            encode(self._adapter.postprocess(outputs, messages), self._adapter.output)
            took_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
        return took_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config", type=json.loads, required=True, help="adapter, options and tier as JSON"
    )
    loop = BareLoop(**parser.parse_args().config)
    with torch.inference_mode():
        print(json.dumps({"event": "ready"}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"event": "done", "model_ms": loop.run(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
