"""The ways to run one model: each built once, compared with eager, and timed against others in turns."""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from torchperf_ros.analysis.gain import gain
from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import AdapterError, TorchperfError
from torchperf_ros.worker.device import Device
from torchperf_ros.worker.engine import Call, make_runner, varying_dims
from torchperf_ros.worker.model_transforms import matrix_precision
from torchperf_ros.worker.output_check import tensors_in
from torchperf_ros.worker.parity import DynamicDims, Parity, ParityError, check_engine, measure, random_inputs
from torchperf_ros.worker.stopwatch import Timing, time_interleaved

_AGAIN = "again"
_BLOCKS = 5
_ROUNDS = (5, 1000)
_SEED = 0

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    Attributes:
        call: takes the model's inputs; None where it could not be made.
        parity: worst figures against eager in fp32; None where they could not be found.
        refused: why it must not be used, "" where it may be.
        compile_s: how long it took to make.
    """

    call: Call | None
    parity: Parity | None = None
    refused: str = ""
    compile_s: float = 0.0


@dataclass(frozen=True)
class Measurement(Generic[Key]):
    """Timings of one interleaved run.

    Attributes:
        timings: by what was timed; whatever could not be made is absent.
        noise: the most by which two copies of the first differed, with 95 % confidence, as a share.
    """

    timings: dict[Key, Timing]
    noise: float


class ModelVariants:
    """Builds, checks and times. Use it inside of `torch.inference_mode`, which compiled models depend on."""

    def __init__(
        self,
        model: torch.nn.Module,
        example: tuple[torch.Tensor, ...],
        dims: DynamicDims,
        device: Device,
        say: Callable[[str], None],
    ) -> None:
        """Take the adapter's model and its inputs, and run it once.

        Args:
            model: on the device, in eval mode; stays as it is.
            example: inputs of the usual shape, on the device.
            dims: of the adapter.
            device: where everything runs.
            say: takes a line of progress.

        Raises:
            AdapterError: the model raises on its example inputs.
        """
        self.model, self.dims, self.device = model, dims, device
        self.inputs = random_inputs(example, _SEED)
        self._example = example
        self._say = say
        self._made: dict[BuildOptions, Variant] = {}
        try:
            self._reference(*example)
        except Exception as error:
            # The user's model runs here: whatever it raises is the reason why nothing can be measured.
            msg = f"the model raises on its own example inputs: {type(error).__name__}: {error}"
            raise AdapterError(msg) from error

    def get(self, options: BuildOptions) -> Variant:
        """The model with these options, made at the first call."""
        if options not in self._made:
            if options.engine != "eager":
                self._say(f"compiling {options.label} ...")
            self._made[options] = variant = self._make(options)
            took = f" in {variant.compile_s:.0f} s" if variant.compile_s else ""
            self._say(f"{options.label}{took}: {variant.refused or variant.parity}")
        return self._made[options]

    def time(self, wanted: Iterable[BuildOptions], seconds: float) -> Measurement[BuildOptions]:
        """Time in turns what could be made; the first, which has to be there, twice, for the noise.

        Args:
            wanted: several may be the same.
            seconds: for each.
        """
        calls = {options: call for options in wanted if (call := self.get(options).call) is not None}
        bound = {options: self._bound(call) for options, call in calls.items()}
        return self._measure(bound, seconds)

    def time_threads(self, counts: Sequence[int], options: BuildOptions, seconds: float) -> Measurement[int]:
        """Time one way with each number of CPU threads, in blocks, as a change of the number takes calls to settle.

        Args:
            counts: the first is the one that is set now, and will be again.
            options: the way to run it; not a compiled one, which keeps the number that it was compiled with.
            seconds: for each number.
        """
        call = self.get(options).call
        assert call is not None
        bound = self._bound(call)
        times: dict[int, list[float]] = {n: [] for n in [*counts, -1]}  # -1: the first, again
        try:
            for block in range(_BLOCKS):
                order = [*counts, -1] if block % 2 else [-1, *reversed(counts)]
                for n in order:
                    torch.set_num_threads(counts[0] if n < 0 else n)
                    took = time_interleaved(
                        {"it": bound}, self.device.device, seconds=seconds / _BLOCKS, rounds=_ROUNDS
                    )
                    times[n].extend(took["it"].times_ms)
        finally:
            torch.set_num_threads(counts[0])
        size = min(map(len, times.values()))
        timings = {n: Timing(_spread(values, size)) for n, values in times.items()}
        again = timings.pop(-1)
        return Measurement(timings, gain(timings[counts[0]], again).spread)

    def time_copies(self, options: BuildOptions, seconds: float) -> Measurement[bool]:
        """Time inputs and outputs by way of pageable memory (False) and of the worker's page-locked buffers (True)."""
        call = self.get(options).call
        assert call is not None
        model: Call = call
        host = tuple(tensor.cpu() for tensor in self.inputs)

        def plain() -> object:
            there = tuple(tensor.to(self.device.device) for tensor in host)
            return [tensor.cpu() for tensor in tensors_in(model(*there))]

        def pinned() -> object:
            return self.device.to_host(model(*self.device.to_device(host)))

        return self._measure({False: plain, True: pinned}, seconds)

    def _measure(self, calls: Mapping[Key, Callable[[], object]], seconds: float) -> Measurement[Key]:
        names = {str(number): key for number, key in enumerate(calls)}
        candidates = {str(number): call for number, call in enumerate(calls.values())}
        candidates[_AGAIN] = candidates["0"]
        with self.device.on_stream():
            timings = time_interleaved(candidates, self.device.device, seconds=seconds, rounds=_ROUNDS)
        noise = gain(timings["0"], timings.pop(_AGAIN)).spread
        return Measurement({names[name]: timing for name, timing in timings.items()}, noise)

    def _make(self, options: BuildOptions) -> Variant:
        call: Call | None = None
        compile_s = 0.0
        try:
            with matrix_precision(options.precision, self.device.device):
                runner = make_runner(self.model, options, self._example, self.dims, self.device.device)
            call, compile_s = self._with_precision(runner.call, options.precision), runner.compile_s
            dims = varying_dims(options, self.dims)
            parity = check_engine(self._reference, call, self._example, dims, options.precision)
        except ParityError as error:
            return Variant(call, self._figures(call), f"parity: {error}", compile_s)
        except TorchperfError as error:
            return Variant(None, refused=str(error))
        except Exception as error:  # the compiler's boundary: a model that it cannot take is refused, with its reason
            return Variant(None, refused=f"{type(error).__name__}: {error}".splitlines()[0])
        return Variant(call, parity, "", compile_s)

    def _figures(self, call: Call | None) -> Parity | None:
        if call is None:
            return None
        try:
            return measure(self._reference(*self.inputs), call(*self.inputs))
        except ParityError:  # another shape
            return None

    def _reference(self, *inputs: torch.Tensor) -> object:
        with matrix_precision("fp32", self.device.device):
            return self.model(*inputs)

    def _with_precision(self, call: Call, precision: str) -> Call:
        if not self.device.is_cuda:
            return call

        def on_cuda(*inputs: torch.Tensor) -> object:
            with matrix_precision(precision, self.device.device):
                return call(*inputs)

        return on_cuda

    def _bound(self, call: Call) -> Callable[[], object]:
        return lambda: call(*self.inputs)


def thread_counts() -> list[int]:
    """1, 2, 4 and so on up to the cores that this process may use, and all of them."""
    cores = len(os.sched_getaffinity(0))
    return sorted({*(1 << n for n in range(cores.bit_length()) if 1 << n <= cores), cores})


def _spread(values: list[float], size: int) -> tuple[float, ...]:
    """So many of the values, evenly from first to last."""
    return tuple(values[index * len(values) // size] for index in range(size))
