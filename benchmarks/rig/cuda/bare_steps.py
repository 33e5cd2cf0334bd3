"""A network's steps in a bare process, as a worker has them: what the steps of a worker are compared with.

Reads one JSON object a line from standard input, `{"seconds": 2, "rate": 30, "marks": false}`, runs an image at
that pace, and answers with one line: of each run the milliseconds by step. Without marks that is the whole alone,
from the message's bytes to the output's; with marks the device is waited for after the model, and outputs are
checked as a worker checks them: on CUDA by sums behind the model, for which the same wait is.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

from benchmarks.rig.cuda.by_hand import captured
from benchmarks.rig.cuda.networks import NetworkAdapter
from benchmarks.rig.messages import IMAGE, image_cdr
from torchperf_ros.api.adapter import Received
from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.messages import decode, encode
from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.worker.tier import EarlySums, OutputCheck


class BareSteps:
    """One network in this process, eager or in a CUDA graph."""

    def __init__(self, options: dict[str, Any], device: str, engine: str, size: list[int]) -> None:
        self._device = Device(choose_device(device), 1)
        self._adapter = NetworkAdapter(options, self._device.device)
        model, example = self._adapter.build("full"), self._adapter.example_inputs("full")[0]
        self._run: Any = captured(model, example) if engine == "graph" else model
        self._check = OutputCheck(self._run(example), fixed_sizes=True)
        self._sums = EarlySums(self._device.device)
        self._cdr = image_cdr(*size)

    def frames(self, seconds: float, rate: float, *, marks: bool) -> list[dict[str, float]]:
        found, due_s = [], time.monotonic()
        for _ in range(round(seconds * rate)):
            data = restamped(self._cdr, time.time_ns())
            due_s += 1 / rate
            time.sleep(max(0.0, due_s - time.monotonic()))
            found.append(self._frame(data, marks=marks))
        return found

    def _frame(self, data: bytes, *, marks: bool) -> dict[str, float]:
        steps: dict[str, float] = {}
        began = since = time.perf_counter_ns()

        def done(step: str) -> None:
            nonlocal since
            now = time.perf_counter_ns()
            steps[step], since = (now - since) / 1e6, now

        adapter = self._adapter
        messages = {"image": Received(decode(data, IMAGE), 0, 0.0)}
        done("decode")
        pixels = adapter.upload(messages["image"].message)
        done("upload")
        image = adapter.scaled(pixels)
        done("preprocess, launched")
        outputs = self._run(image)
        done("model, launched")
        if marks:
            is_finite = False
            if self._device.is_cuda:
                self._sums.begin(outputs)
                done("sums of outputs, launched")
                torch.cuda.current_stream().synchronize()
                is_finite = self._sums.are_finite()
            done("wait for the device")
            self._check.check(outputs, is_finite=is_finite)
            done("check of outputs")
        message = adapter.postprocess(outputs, messages)
        done("postprocess")
        encode(message, adapter.output)
        done("encode")
        whole = (time.perf_counter_ns() - began) / 1e6
        return {**steps, "whole": whole} if marks else {"whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="of `BareSteps`, as JSON")
    with torch.inference_mode():
        bare = BareSteps(**parser.parse_args().config)
        for line in sys.stdin:
            print(json.dumps({"frames": bare.frames(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
