"""A small adapter for tuning.

Its `options` say what goes wrong in which precision. Imported by trial processes.

Options: `crash_in`, `hang_in`, `wrong_in`, `wait_in` (for the device): a precision; `sizes`: true: the
batch varies; `touch`: a file that each built model appends a byte to; `seed`: null: the weights are others at
every build; `task`: whether there is a training task, `error` of whose figures is a distance from eager's
outputs in 1/1000, or `hits` 1 less that.
"""

import os
import signal
import time
from pathlib import Path

import torch

from torchperf_ros.api.adapter import Adapter, Task
from torchperf_ros.api.errors import ConfigError

_WHAT = ("crash_in", "hang_in", "wrong_in", "wait_in")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(torch.nn.Module):
    """Two layers that misbehave once their weights have the type of a precision.

    Not `Linear`, which int8 is for.
    """

    def __init__(self, width, options):
        super().__init__()
        self.first, self.second = torch.nn.Conv1d(16, width, 1), torch.nn.Conv1d(width, 4, 1)
        self._do = {_DTYPES[options[what]]: what for what in _WHAT if what in options}

    def forward(self, x):
        do = self._do.get(self.first.weight.dtype)
        if do == "crash_in":
            os.kill(os.getpid(), signal.SIGSEGV)
        if do == "hang_in":
            time.sleep(3600)
        y = self.second(torch.relu(self.first(x)))
        if do == "wait_in":
            float(y.sum())
        return y + 1.0 if do == "wrong_in" else y


class NearTask(Task):
    """Judges by the distance from the outputs of tier `full`."""

    def __init__(self, figure, model):
        self.higher_is_better, self._figure, self._model = figure == "hits", figure, model

    def judge(self, call, seed, count, device):
        assert seed == "held out"
        generator, errors = torch.Generator().manual_seed(0), []
        for _ in range(count):
            inputs = torch.randn(4, 16, 1, generator=generator)
            errors.append(float((call(inputs) - self._model(inputs)).abs().mean()))
        error = 1000 * sum(errors) / count
        return {self._figure: error if self._figure == "error" else 1.0 - error}


class TinyAdapter(Adapter):
    """A perceptron; tiers `full` and `fast`."""

    def __init__(self, options, device):
        known = {*_WHAT, "sizes", "touch", "seed", "task"}
        if set(options) - known:
            msg = (
                f"option {sorted(set(options) - known)[0]!r} is not allowed; it has to be one of"
                f" {sorted(known)}"
            )
            raise ConfigError(msg)
        self.inputs, self.output = {"x": "std_msgs/msg/Float64"}, "std_msgs/msg/Float64"
        self._options, self._device = options, device

    def build(self, tier):
        if "touch" in self._options:
            with Path(self._options["touch"]).open("ab") as file:
                file.write(b".")
        if self._options.get("seed", 0) is not None:
            torch.manual_seed(0)
        return Net({"full": 64, "fast": 32}[tier], self._options)

    def example_inputs(self, tier):
        return (torch.linspace(-1.0, 1.0, 64, device=self._device).reshape(4, 16, 1),)

    def dynamic_dims(self):
        return {0: {0: (2, 32)}} if self._options.get("sizes") else {}

    def unpad(self, outputs, shapes):
        return outputs[: shapes[0][0]]

    def training_task(self, log):
        return NearTask(self._options["task"], self.build("full")) if "task" in self._options else None

    preprocess = postprocess = None  # no frame comes
