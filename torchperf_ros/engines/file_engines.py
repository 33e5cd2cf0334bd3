"""The engines that build a file: AOTInductor, ONNX Runtime, OpenVINO and TensorRT.

AOTInductor exports a model and compiles it ahead of time into a `.pt2` file, which loads in milliseconds.
Each other library is imported where it is used, nowhere else.
"""

import ctypes
import functools
import io
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchperf_ros.engines.built_tier import BuiltTier, Call, Inputs
from torchperf_ros.engines.device import time_interleaved
from torchperf_ros.engines.engine import EngineUnavailable, prepare_inductor
from torchperf_ros.engines.model_transforms import (
    int8_in_onnx,
    int8_in_package,
    quantise_static,
    quiet_log,
    transform,
)
from torchperf_ros.engines.package_engine import (
    Built,
    FlatCall,
    PackageEngine,
    built_of,
    check_count,
    export,
    exported,
    nested,
    written_to,
)
from torchperf_ros.engines.parity import DynamicDims
from torchperf_ros.settings.build_options import DISTRIBUTIONS, INT8_STATIC, BuildOptions
from torchperf_ros.workers.package_manifest import PackageError

_MADV_DONTNEED: Final = 4  # sys/mman.h
_READ_ONLY: Final = re.compile(
    r"^(\w+)-(\w+) r--p [^\n]*/aotinductor/[^\n]*\n(?:[A-Z][^\n]*\n)*?Anonymous: +0 kB", re.MULTILINE
)  # of the files that a package unpacks to
_CUDA_HEADER = "cuda_runtime_api.h"
_CPP_LIBRARY = b"libstdc++.so"
_VARIANT_SECONDS, _ROUNDS = 0.5, (5, 200)


class Aoti(PackageEngine):
    """AOTInductor, which is part of torch."""

    name = "aoti"
    keeps_nest = True

    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        if options.precision != INT8_STATIC:
            return build_package(tier.model, tier.example, tier.dims, path)
        if why := tier.why_uncalibrated():
            raise EngineUnavailable(f"{INT8_STATIC}: {why}")
        program = export(tier.model, tier.example, tier.dims)
        return build_package(
            quantise_static(program.module(check_guards=False), tier.calibration()),
            tier.example,
            tier.dims,
            path,
            frozen_only=True,
        )

    def in_int8(self, path: Path) -> Counter[str]:
        return int8_in_package(path)

    def open(self, path: Path, options: BuildOptions, device: torch.device) -> Call:
        return load_package(path, device)


def build_package(
    model: torch.nn.Module,
    example: Inputs,
    dynamic_dims: DynamicDims,
    path: Path,
    *,
    frozen_only: bool = False,
) -> Built:
    """Export a model, compile it in each of its variants, and keep the fastest as the file `path`.

    `frozen_only`: of int8_static Inductor makes int8 kernels where it packs weights, and nowhere else.

    Raises:
        PackageError: there is no C++ compiler, or what compiles for CUDA is not installed.
        Exception: torch's error, which cannot export or compile the model.
    """
    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise PackageError(
            f"packages cannot be built here: the C++ compiler {compiler} is not there; install g++, or set"
            " CXX to one that is"
        )
    if any(tensor.is_cuda for tensor in example):
        check_toolkit()
    device = next((tensor.device for tensor in example), torch.device("cpu"))
    calls: dict[str, Callable[[], Any]] = {}
    files: dict[str, Path] = {}
    errors: list[Exception] = []
    prepare_inductor(device)
    program = export(model, example, dynamic_dims)
    try:
        variants = {"frozen": (model, True)} if frozen_only else _variants(model, program, example, device)
        for name, (variant, frozen) in variants.items():
            file = files[name] = path.with_name(f"{path.stem}.{len(files)}.pt2")
            try:
                with torch.no_grad():  # where gradients are recorded, Inductor freezes nothing, in silence
                    torch._inductor.aoti_compile_and_package(
                        program if variant is model else export(variant, example, dynamic_dims),
                        package_path=str(file),
                        inductor_configs={"freezing": frozen},
                    )
                check_linked(file)
                calls[name] = partial(load_package(file, device), *example)
            except Exception as error:  # the compiler's boundary: another variant may do
                errors.append(error)
        if not calls:
            raise errors[0]
        with torch.inference_mode():
            found = time_interleaved(calls, device, seconds=_VARIANT_SECONDS, rounds=_ROUNDS)
        ranked = sorted(found, key=lambda name: found[name].median_ms)
        files[ranked[0]].rename(path)
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)
    return built_of(program, variants_ms={name: found[name].median_ms for name in ranked})


def _variants(
    model: torch.nn.Module, program: torch.export.ExportedProgram, example: Inputs, device: torch.device
) -> dict[str, tuple[torch.nn.Module, bool]]:
    """The ways to compile a model out of which the fastest is kept: name -> model, frozen.

    `frozen`: Inductor folds what follows from weights alone, batch normalisation too, and packs weights as
    the machine's kernels want them. With convolutions that pays, so that it is the memory format that is
    open, where Inductor does not choose channels last itself; without, packed weights may be slower for the
    few rows that a vehicle has, and `plain` is the other one. A model without weights has nothing to freeze;
    of one that writes to its buffers, Inductor would freeze what changes.
    """
    if not program.state_dict or "buffers" in written_to(program):
        return {"plain": (model, False)}
    images = transform(model, BuildOptions(channels_last=True), device, example)
    if images is model:
        return {"frozen": (model, True), "plain": (model, False)}
    if lays_out_images(program, device):
        return {"frozen": (model, True)}
    return {"frozen": (model, True), "frozen channels_last": (images, True)}


def lays_out_images(program: torch.export.ExportedProgram, device: torch.device) -> bool:
    """Whether Inductor runs these convolutions in channels last by its own rule.

    See `GraphLowering.decide_layout_opt`. On the CPU it always does. On CUDA it does where sizes are fixed,
    groups have one channel or all, and there are fewer than 300 operations for each convolution: of those
    into which it takes these apart.
    """
    if device.type == "cpu":
        return bool(torch.backends.mkldnn.is_available())
    convolutions = [node for node in program.graph.nodes if str(node.target).startswith("aten.conv")]
    return (
        not program.range_constraints
        and len(program.graph.nodes) < 100 * len(convolutions)
        and all(
            node.args[1].meta["val"].shape[1] in {1, node.args[0].meta["val"].shape[1]}
            for node in convolutions
        )
    )


def check_toolkit() -> None:
    """Raise a `PackageError` before the long export where CUDA's headers for a package are missing."""
    from torch.utils import cpp_extension

    try:
        folders = [
            *cpp_extension.include_paths("cuda"),
            "/usr/include",
        ]  # Debian's, which the compiler knows itself
    except OSError:  # no toolkit at all
        folders = []
    if not any(Path(folder, _CUDA_HEADER).is_file() for folder in folders):
        raise PackageError(
            f"packages for CUDA cannot be built here: {_CUDA_HEADER} is missing"
            f" ({', '.join(folders) or 'no toolkit was found'}); install a CUDA"
            " toolkit or set CUDA_HOME, or build them on a machine with the same card and torch"
        )


def check_linked(path: Path) -> None:
    """A `PackageError` for a package with a C++ library of its own.

    Beside torch's, loading it ends the process.
    """
    with zipfile.ZipFile(path) as package:
        libraries = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    if not all(_CPP_LIBRARY in library for library in libraries):
        raise PackageError(
            f"the compiler {os.environ.get('CXX', 'g++')} has linked a C++ library of its own into the"
            " package, which would crash beside torch's; set CXX and CC to one that links the system's,"
            " such as /usr/bin/g++"
        )


def load_package(path: Path, device: torch.device) -> Callable[..., Any]:
    """Load a package, which takes the model's inputs, positional tensors, and does not check their sizes.

    The loader is called without its Python wrapper, whose import alone takes longer than a worker has to
    start. It runs for one thread: for several it would ask the device whether earlier runs are over, which
    no capture as a CUDA graph permits.
    """
    index = -1 if device.type == "cpu" else device.index or 0
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    tree = pytree.treespec_loads(loader.get_call_spec()[1])
    _give_back_constants()
    return nested(lambda *inputs: loader.boxed_run(list(inputs)), tree)


def _give_back_constants() -> None:
    """Give back the pages of packages' constants.

    The loader has copied them, and the file's are not read again.

    That was as much memory again as all weights take, in each worker. Only mappings count that cannot be
    written to and were not (`Anonymous`, see proc(5)): a later read of one gets its pages from the file.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for start, end in _READ_ONLY.findall(mappings):
        first, behind = int(start, 16), int(end, 16)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(behind - first), _MADV_DONTNEED)


_HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_FOR_CUDA = "onnxruntime-gpu"
_CUDA_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_INT8 = "int8_dynamic"
_TYPES: dict[str, tuple[torch.dtype, type]] = {
    "tensor(float)": (torch.float32, np.float32), "tensor(float16)": (torch.float16, np.float16),
    "tensor(double)": (torch.float64, np.float64), "tensor(bool)": (torch.bool, np.bool_),
    "tensor(int64)": (torch.int64, np.int64), "tensor(int32)": (torch.int32, np.int32),
    "tensor(int16)": (torch.int16, np.int16), "tensor(int8)": (torch.int8, np.int8),
    "tensor(uint8)": (torch.uint8, np.uint8),
}  # fmt: skip


class OnnxRuntime(PackageEngine):
    """ONNX Runtime on the CPU, and on CUDA where its build has that provider.

    On the CPU int8_dynamic is its own dynamic quantisation of matrix products; it has no kernels for half
    precision there. Denormals are computed as they are, as torch does.
    """

    name = "onnxruntime"
    distributions = DISTRIBUTIONS["onnxruntime"]
    precisions = {"cpu": ("fp32", "int8_dynamic"), "cuda": _CUDA_PRECISIONS}
    build_distributions = ("onnx", "onnxscript")

    def why_not(self, options: BuildOptions, dynamic_dims: DynamicDims, device: torch.device) -> str:
        why = super().why_not(options, dynamic_dims, device)
        if not why and device.type == "cuda" and not self.version.startswith(_FOR_CUDA):
            return f"engine {self.name} needs the package {_FOR_CUDA} on CUDA: pip install {_FOR_CUDA}"
        return why

    def for_model(self, options: BuildOptions) -> BuildOptions:
        return BuildOptions(precision="fp32" if options.precision == _INT8 else options.precision)

    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        """Export to ONNX, optimise, and save the optimised graph: loading it optimises nothing."""
        program = exported(tier)
        built = built_of(program)
        with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
            plain = Path(folder) / "plain.onnx"
            with warnings.catch_warnings(), quiet_log("torch.onnx"):
                warnings.simplefilter("ignore")
                graph = torch.onnx.export(program, dynamo=True, external_data=False, verbose=False)
            assert graph is not None
            # One file: what the manifest's hash covers is all there is.
            graph.save(str(plain), external_data=False)
            if options.precision == _INT8:
                plain = _quantised(plain)
                built = replace(built, left=built.left - int8_in_onnx(plain))
            session = _onnx_session(plain, options, tier.device, path)
            check_count(len(session.get_outputs()), program)
        return built

    def in_int8(self, path: Path) -> Counter[str]:
        return int8_in_onnx(path)

    def open(self, path: Path, options: BuildOptions, device: torch.device) -> FlatCall:
        session = _onnx_session(path, options, device)
        if device.type == "cuda":
            return _CudaCall(session, device)
        names = [each.name for each in session.get_inputs()]
        outputs = [each.name for each in session.get_outputs()]

        def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
            """Inputs are read where they are; outputs are new memory at every call."""
            arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
            return [torch.from_numpy(array) for array in session.run(outputs, arrays)]

        return call


class _CudaCall:
    """Calls with inputs and outputs in torch's own device memory.

    Outputs of sizes that vary come by way of the host.

    ONNX Runtime waits for its stream before it returns. Where that is not the one that made the inputs,
    these are waited for first.
    """

    # The library has no types.
    def __init__(self, session: Any, device: torch.device) -> None:  # noqa: ANN401
        self._session, self._device, self._index = session, device, device.index or 0
        # 0, the default one, is not handed over.
        self._stream = torch.cuda.current_stream(device).cuda_stream
        self._inputs = [(each.name, *_TYPES[each.type]) for each in session.get_inputs()]
        self._outputs = [(each.name, *_TYPES[each.type], each.shape) for each in session.get_outputs()]
        self._fixed = all(isinstance(size, int) for *_, shape in self._outputs for size in shape)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream(self._device)
        if not self._stream or stream.cuda_stream != self._stream:
            stream.synchronize()
        binding, kept = self._session.io_binding(), [tensor.contiguous() for tensor in inputs]
        for (name, _, kind), tensor in zip(self._inputs, kept, strict=True):
            binding.bind_input(name, "cuda", self._index, kind, tuple(tensor.shape), tensor.data_ptr())
        results = []
        for name, dtype, kind, shape in self._outputs:
            if self._fixed:
                results.append(torch.empty(shape, dtype=dtype, device=self._device))
                binding.bind_output(name, "cuda", self._index, kind, shape, results[-1].data_ptr())
            else:
                binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        if self._fixed:
            return results
        return [torch.from_numpy(array).to(self._device) for array in binding.copy_outputs_to_cpu()]


def _onnx_session(
    path: Path, options: BuildOptions, device: torch.device, optimised: Path | None = None
) -> Any:  # noqa: ANN401 - the library has no types
    """A session that runs a file: an optimised one, or one whose optimised graph is saved as such."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.inter_op_num_threads = 1
    # Errors only: it warns that an optimised file is for this machine, which the cache's key ensures.
    settings.log_severity_level = 3
    # Its threads spin while a model runs, and not until the next frame, when others need the processor.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if optimised is not None:
        settings.optimized_model_filepath = str(optimised)
    else:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = list(_providers(options, device).items())
    return onnxruntime.InferenceSession(str(path), settings, providers=providers)


def _providers(options: BuildOptions, device: torch.device) -> dict[str, dict[str, str]]:
    """Execution providers with their settings, the preferred one first.

    The CPU's takes what the others have not.
    """
    if device.type == "cpu":
        return {"CPUExecutionProvider": {}}
    settings = {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(torch.cuda.current_stream(device).cuda_stream),
        "use_tf32": str(int(options.precision == "tf32")),  # on by its own default; fp32 means fp32
    }
    return {"CUDAExecutionProvider": settings, "CPUExecutionProvider": {}}


def _quantised(plain: Path) -> Path:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model, path = onnx.load(str(plain)), plain.with_name("quantised.onnx")
    # Shapes of weights, some of which it transposes and then compares with these.
    del model.graph.value_info[:]
    quantize_dynamic(model, str(path), weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    return path


class OpenVino(PackageEngine):
    """OpenVINO on the CPU.

    Half precision is a hint to it: weights stay in fp32, and it computes in what the processor has.
    Denormals are computed as they are, as torch does.
    """

    name = "openvino"
    distributions = DISTRIBUTIONS["openvino"]
    precisions = {"cpu": tuple(_HINTS)}  # int8 would need a library of its own

    def for_model(self, options: BuildOptions) -> BuildOptions:
        return BuildOptions()

    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        import openvino

        program = exported(tier)
        with warnings.catch_warnings():  # of torch, about how it is used
            warnings.simplefilter("ignore")
            converted = openvino.convert_model(program)
        for index, tensor in enumerate(tier.example):
            spans = {dim % tensor.dim(): span for dim, span in tier.dims.get(index, {}).items()}
            sizes = [
                openvino.Dimension(*spans.get(dim, (size, size))) for dim, size in enumerate(tensor.shape)
            ]
            converted.inputs[index].get_node().set_partial_shape(openvino.PartialShape(sizes))
        converted.validate_nodes_and_infer_types()
        check_count(len(converted.outputs), program)
        compiled = _openvino_core().compile_model(converted, "CPU", _openvino_settings(options))
        path.write_bytes(compiled.export_model().getvalue())
        return built_of(program)

    def open(self, path: Path, options: BuildOptions, device: torch.device) -> FlatCall:
        import openvino

        compiled = _openvino_core().import_model(
            io.BytesIO(path.read_bytes()), "CPU", _openvino_settings(options)
        )
        request, numbers = compiled.create_infer_request(), range(len(compiled.outputs))

        def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
            """Inputs are read where they are; outputs are new memory at every call.

            OpenVINO's own is written to by the next call, and is the input's where an output is an input as it
            came: memory that is handed to it beforehand stays empty then.
            """
            held = [tensor.contiguous().numpy() for tensor in inputs]
            for number, array in enumerate(held):
                request.set_input_tensor(number, openvino.Tensor(array, shared_memory=True))
            request.infer()
            return [torch.from_numpy(request.get_output_tensor(number).data.copy()) for number in numbers]

        return call


@functools.cache
def _openvino_core() -> Any:  # noqa: ANN401 - `openvino.Core`, of a library that may be absent
    """One for the process, never released.

    Its part for processors gives the thread that loads it a signal stack and unmaps that when it is
    released, from another thread also while it is in use: the next signal then ends the process without a
    word.
    """
    import openvino

    return openvino.Core()


def _openvino_settings(options: BuildOptions) -> dict[str, Any]:
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        # by its own default bf16 where the processor has it: fp32 means fp32
        "INFERENCE_PRECISION_HINT": _HINTS[options.precision],
        # by its own default it binds its threads to the first processors: those of every worker to the same
        # ones
        "ENABLE_CPU_PINNING": False,
    }


class TensorRt(PackageEngine):
    """Torch-TensorRT on CUDA: operators that TensorRT has run there, the others as Inductor compiles them.

    Precision is what the weights have been cast to: TensorRT takes the types of the graph as they are.
    Sizes are fixed: the package is exported again around the engines, and what that keeps of ranges has not
    been tried.
    """

    name = "tensorrt"
    distributions = DISTRIBUTIONS["tensorrt"]
    precisions = {"cuda": _CUDA_PRECISIONS}  # int8 would need calibration data
    dynamic = False
    keeps_nest = True

    def convert(self, tier: BuiltTier, options: BuildOptions, path: Path) -> Built:
        import torch_tensorrt

        program = exported(tier)
        graph = torch_tensorrt.dynamo.compile(
            program,
            arg_inputs=list(tier.example),
            device=tier.device,
            use_explicit_typing=True,
            disable_tf32=options.precision != "tf32",
        )
        torch_tensorrt.save(
            graph, str(path), output_format="aot_inductor", arg_inputs=list(tier.example), retrace=True
        )
        return built_of(program)

    def open(self, path: Path, options: BuildOptions, device: torch.device) -> Call:
        import torch_tensorrt  # noqa: F401

        return load_package(path, device)
