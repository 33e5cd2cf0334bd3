"""CUDA graphs: what is replayed, which models cannot be captured, and what auto makes of both."""

import contextlib
import gc
import itertools
import subprocess
import sys
import textwrap
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import CaptureFailed, CaptureRecord, EngineUnavailable, GraphReplay
from torchperf_ros.engines.fingerprint import identify
from torchperf_ros.engines.package import make_runner, ways_of
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.package_cache import PackageCache

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def layers(device):
    torch.manual_seed(0)
    return (
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        .eval()
        .to(device)
    )


class Recorded(TorchDispatchMode):
    """A CUDA graph without CUDA: its kernels, with the addresses of then, which it keeps not alive.

    As on a device, what waits for a value cannot be captured.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.made = [], []

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        if kernel is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = kernel(*args, **(kwargs or {}))
        self.kernels.append(
            (kernel, pytree.tree_map_only(torch.Tensor, self.address, args), kwargs or {}, made)
        )
        self.made.append(made)
        return made

    def pool(self):
        return (0, 1)

    def address(self, tensor):
        return (lambda: tensor) if any(tensor is one for one in self.made) else weakref.ref(tensor)

    def replay(self):
        for kernel, args, kwargs, made in self.kernels:
            made.copy_(kernel(*(arg() if callable(arg) else arg for arg in args), **kwargs))


@contextlib.contextmanager
def captured(graph):
    """As `torch.cuda.graph`, whose end raises as well where an operation was not permitted."""
    try:
        with graph:
            yield
    finally:
        if isinstance(sys.exc_info()[1], RuntimeError):
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams and graphs without CUDA: the caller's stream, and which streams wait and are set."""
    cuda, waits, current = torch.cuda, [], []
    side, caller = (SimpleNamespace(name=name, wait_stream=waits.append) for name in ("side", "caller"))
    monkeypatch.setattr(cuda, "current_stream", lambda _: caller)
    monkeypatch.setattr(cuda, "Stream", lambda _: side)
    monkeypatch.setattr(cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(cuda, "graph", lambda graph, pool, capture_error_mode: captured(graph))
    monkeypatch.setattr(cuda, "set_stream", current.append)
    return SimpleNamespace(side=side, caller=caller, waits=waits, current=current)


def test_given_a_captured_model_that_is_kept_nowhere_else_when_called_then_its_weights_answer_every_shape(
    streams,
):
    net, calls = layers(CPU), []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    frames = [torch.randn(*shape) for shape in ((2, 8), (4, 8), (2, 8), (3, 8), (2, 2, 8))]
    with torch.inference_mode():
        expected = [net(frame) for frame in frames]
        calls.clear()
        replay = GraphReplay(net, (torch.zeros(2, 8),))
        del net
        gc.collect()
        assert len(calls) == 4  # three to warm up, on a stream of their own, and one to capture
        assert streams.waits == [streams.caller, streams.side]
        for _ in range(2):
            replay.capture((torch.zeros(4, 8),))
        for frame, answer in zip(frames, expected, strict=True):
            torch.testing.assert_close(replay(frame), answer)
        assert len(calls) == 8 + 2  # of what is not captured the model itself answers


def gives_up(x):
    try:
        return x[9]
    except IndexError:
        raise ValueError("too short")  # noqa: B904 - as it stands in models


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda x: x * float(x.sum()), "RuntimeError: operation not permitted"),
        (
            lambda x, calls=[]: gives_up(x) if calls.append(1) or len(calls) == 4 else x,
            "ValueError: too short",
        ),
    ],
)
def test_given_a_model_that_waits_for_a_value_when_captured_then_the_error_says_so_and_the_stream_is_the_callers(
    streams, model, says
):
    with pytest.raises(
        CaptureFailed, match=rf"it cannot be captured as a CUDA graph: test_graph.py:\d+: .*: {says}"
    ):
        GraphReplay(model, (torch.ones(3),))
    assert streams.current == [streams.caller]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "aoti"])
def test_given_cuda_graphs_with_an_engine_when_made_then_it_agrees_with_eager(engine):
    """The memory that the captured copy's weights had is written to.

    The graph still has to read its weights.
    """
    net, inputs = layers(CUDA), torch.randn(2, 8, device=CUDA)
    options = BuildOptions(engine=engine, cuda_graphs=True, precision="fp16")  # of a copy of the model
    runner = make_runner(BuiltTier(net, (torch.zeros(2, 8, device=CUDA),), {}, CUDA), options)
    gc.collect()
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), 1e4, device=CUDA) for _ in range(64)]
    with torch.inference_mode():
        assert torch.allclose(runner.call(inputs), net(inputs), atol=1e-2)
    del filled


@pytest.fixture
def said():
    return []


@pytest.fixture
def record(tmp_path, said):
    """What is known of one model, as each process finds it anew."""
    folder = tmp_path / "cache"
    tier = BuiltTier(layers(CPU), (torch.zeros(2, 8),), {}, CPU)
    identity = identify(tier, BuildOptions("graph"))
    return lambda: CaptureRecord(PackageCache(folder, 1 << 20), identity, said.append)


def fail(record, cause):
    with pytest.raises(CaptureFailed) as caught, record().trying():
        raise CaptureFailed("it cannot be captured: mask.item()") from cause
    return caught.value


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (RuntimeError("operation not permitted"), "it cannot be captured: mask.item()"),
        (torch.OutOfMemoryError("out of memory"), ""),
    ],
)
def test_given_a_capture_that_failed_when_another_process_asks_then_it_has_the_reason_unless_memory_lacked(
    record, said, cause, why
):
    assert record().why_not() == ""
    error = fail(record, cause)
    assert (error.is_known, error.lacked) == (bool(why), "" if why else record().key)
    assert record().why_not() == why
    assert said == [record().key, ""]  # for the parent, which would see this process die in between


def test_given_processes_that_were_seen_to_die_of_a_capture_when_another_asks_then_one_may_be_chance_and_two_are_not(
    record, tmp_path
):
    cache, key = PackageCache(tmp_path / "cache", 0), record().key
    assert cache.keep_uncapturable(key)
    with record().trying():
        pass  # a capture that succeeds forgets the death
    cache.keep_uncapturable(key)
    # What an earlier version has left of a process whose node had ended, and of another user.
    (cache.folder / f"{key}.{2**22 + 1}.capturing").touch()
    (cache.folder / f"{key}.capturing").unlink()
    (cache.folder / f"{key}.capturing").mkdir()
    with record().trying():
        pass
    (cache.folder / f"{key}.capturing").rmdir()
    for why in ("", "2 processes have died while they captured it"):
        cache.keep_uncapturable(key)
        assert record().why_not() == why


@pytest.mark.parametrize("when", [1, 4])  # as it warms up, and as it is captured
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("API call failed"), ""]
)
def test_given_too_little_memory_of_any_kind_when_captured_then_nothing_is_known_and_there_may_be_more_the_next_time(
    streams, monkeypatch, record, error, when
):
    calls = []

    def model(x):
        calls.append(1)
        if len(calls) == when:
            raise error or RuntimeError(
                "CUDA error: out of memory"
            )  # as of what the driver itself allocates
        return x

    # The allocator's count: an error of a package names no memory.
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_ooms": len(calls) >= when})
    with pytest.raises(CaptureFailed) as caught:
        GraphReplay(model, (torch.ones(3),), record())
    assert (caught.value.lacked, record().why_not()) == (record().key, "")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert streams.current == [streams.caller]


def test_given_another_driver_when_a_capture_had_failed_then_it_is_tried_again(
    record, monkeypatch, tmp_path
):
    driver = tmp_path / "version"
    monkeypatch.setattr("torchperf_ros.engines.engine._DRIVER", driver)
    fail(record, RuntimeError("operation not permitted"))
    driver.write_text("580.159.03\n")
    assert record().why_not() == ""
    for _ in range(2):
        PackageCache(tmp_path / "cache", 0).keep_uncapturable(record().key)
    assert record().why_not().startswith("2 processes")


def test_given_a_folder_that_cannot_be_written_when_a_capture_fails_then_the_next_process_has_to_be_informed(
    tmp_path,
):
    tier = BuiltTier(layers(CPU), (torch.zeros(2, 8),), {}, CPU)
    (tmp_path / "file").touch()
    cache = PackageCache(tmp_path / "file" / "cache", 1 << 20)
    record = CaptureRecord(cache, identify(tier, BuildOptions("graph")))
    assert not fail(lambda: record, RuntimeError()).is_known
    assert record.why_not() == ""


class Tabled(torch.nn.Module):
    """Keeps a table for the size of the last call, as detectors keep their anchors."""

    table = None

    def forward(self, x):
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x) * 1.0)[:, None]
        return x + self.table


@pytest.mark.usefixtures("streams")
def test_given_a_model_that_gives_up_its_table_for_another_size_when_replayed_then_each_graph_has_its_own():
    net = Tabled()
    with torch.inference_mode():
        replay = GraphReplay(net, (torch.zeros(2, 8),))
        replay.capture((torch.zeros(4, 8),))
        for rows in (2, 4, 3, 2, 4):
            net.table = None  # as when its state is put back to what its build gave it
            frame = torch.randn(rows, 8)
            torch.testing.assert_close(replay(frame), Tabled()(frame))


class Reusing(torch.nn.Module):
    """Fills the same dict at each call, and gives what it was given."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def forward(self, x):
        self.found |= {"y": x * 2.0, "x": x, "pair": SimpleNamespace(sum=x.sum())}
        return self.found


@pytest.mark.usefixtures("streams")
def test_given_outputs_that_are_kept_and_changed_when_replayed_then_each_frame_has_its_own_as_in_eager():
    net, kept = Reusing(), []
    with torch.inference_mode():
        replay = GraphReplay(net, (torch.zeros(2, 8),))
        for _ in range(3):
            frame = torch.randn(2, 8)
            net(torch.zeros(2, 8))  # as eager runs in between
            found, expected = replay(frame), Reusing()(frame)
            parts = [found["y"][1:].numpy(), found["x"].detach(), found.pop("pair").sum]
            kept.append((parts, [expected["y"][1:].numpy(), frame, frame.sum()]))
            found["more"] = 1
    for parts, expected in kept:
        for part, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, wanted)


def times(x):
    return x * 2.0, time.monotonic()


def aged(x):
    return x * time.monotonic()


def turned(x, turns=itertools.count()):  # noqa: B008
    return x.neg() if next(turns) % 2 else x.abs()


def rows(x):
    return {"rows": (row for row in x * 2.0), "x": x + 1.0}


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (times, "its outputs hold a generator, or a plain value that"),
        (rows, "its outputs hold a generator, or a plain value that"),
        (aged, r"it computes otherwise at each call, aten.mul.Tensor\["),
        (turned, "it computes otherwise at each call, aten.(abs|neg)"),
    ],
)
def test_given_what_a_graph_would_repeat_though_a_model_does_not_when_captured_then_eager_has_to_run(
    model, why, record
):
    for _ in range(2):  # nothing is kept, as nothing is broken
        with pytest.raises(EngineUnavailable, match=why):
            GraphReplay(model, (torch.zeros(2, 8),), record())
        assert record().why_not() == ""


def test_given_convolutions_in_half_precision_when_auto_lists_its_ways_then_a_graph_has_channels_last(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    tier = BuiltTier(layers(CPU), (torch.zeros(2, 8),), {}, CUDA)
    for precision, is_last in (("fp32", False), ("tf32", False), ("bf16", True), ("fp16", True)):
        ways, _ = ways_of(tier, BuildOptions("auto", precision=precision))
        assert list(ways)[0] == "eager"
        assert ways["graph"].channels_last is is_last


def test_given_engine_graph_on_the_cpu_when_made_then_the_reason_names_the_device():
    with pytest.raises(EngineUnavailable, match="engine graph runs on cuda; the device here is cpu"):
        make_runner(BuiltTier(layers(CPU), (torch.zeros(2, 8),), {}, CPU), BuildOptions("graph"))


# --- as a worker loads it; each in a process of its own, as a failed capture leaves nothing to rely on

LOADED = """
    import sys
    import torch
    from torchperf_ros.api.adapter import Adapter
    from torchperf_ros.engines.built_tier import build_model
    from torchperf_ros.engines.device import Device, choose_device
    from torchperf_ros.engines.engine import CaptureFailed
    from torchperf_ros.settings.build_options import BuildOptions
    from torchperf_ros.settings.build_options import ShapeOptions
    from torchperf_ros.worker.tier_loader import TierLoader
    from torchperf_ros.workers.worker_setup import WorkerSetup

    class Net(torch.nn.Module):
        table = None

        def __init__(self, waits, tabled):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
            self.waits, self.tabled = waits, tabled

        def forward(self, x):
            if self.tabled:  # made anew for another size than that of the last call
                if self.table is None or len(self.table) != len(x):
                    self.table = torch.arange(len(x) * 1.0, device=x.device)[:, None]
                x = x + self.table
            if self.waits and float(x.sum()) > 1e9:
                return self.layers(-x)
            return self.layers(x)

    class Own(Adapter):
        inputs, output = {"x": "std_msgs/msg/String"}, "std_msgs/msg/String"

        def __init__(self, options, device):
            self.options, self.device = options, device

        def build(self, tier):
            torch.manual_seed(0)
            return Net(self.options.get("waits"), self.options.get("tabled"))

        def example_inputs(self, tier):
            return (torch.ones(1, 8, device=self.device),)

        def dynamic_dims(self):
            return {0: {-2: (1, 8)}} if self.options.get("varies") else {}  # from the end, as torch allows

        def unpad(self, outputs, shapes):
            return outputs[: shapes[0][0]]

        def preprocess(self, messages):
            raise NotImplementedError

        def postprocess(self, outputs, messages):
            raise NotImplementedError

    device, said = Device(choose_device("cuda:0"), 1), []

    def load(options=BuildOptions("auto"), shapes=ShapeOptions("dynamic"), batch=1, **own):
        adapter = Own(own, device.device)
        setup = WorkerSetup("tested", "", {}, ("full",), (options,), ("",), (0,), (-1,), cache_dir=sys.argv[1],
                            cache_mib=4096, shapes=shapes, batch=batch)
        loader = TierLoader(adapter, setup, device, said.append)
        with torch.inference_mode():
            tier = loader.load(0)
            eager = build_model(adapter, "full").to(device.device)
            for rows in (1, 3, 5, 1) if own.get("varies") else (1, 1, 1):
                inputs = (torch.randn(rows, 8),)
                found = tier.run(inputs)[0]
                assert torch.allclose(found, eager(inputs[0].to(device.device)), atol=1e-4), (rows, tier.facts)
                assert not tier.facts.engine_errors
        return tier, loader
"""


@pytest.fixture
def run(tmp_path):
    """Runs code in a new process after what `LOADED` gives it, with one cache for all; gives its output."""
    cache = tmp_path / "cache"

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(LOADED) + textwrap.dedent(code), str(cache)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.mark.gpu
def test_given_auto_and_no_package_when_loaded_then_a_graph_answers_from_the_first_frame(run):
    run("""
        tier, loader = load()
        found = tier.facts.engine, tier.facts.why, loader.missing
        assert found == ("graph", "not compiled yet", ["full"]), tier.facts
        assert device.graph_bytes > 0 and not said
        tier, loader = load(BuildOptions("graph", precision="tf32"))
        assert (tier.facts.engine, tier.facts.why, loader.missing) == ("graph", "", []), tier.facts
    """)


@pytest.mark.gpu
def test_given_sizes_that_vary_when_loaded_then_buckets_and_batches_have_a_graph_each_and_others_are_refused(
    run,
):
    run("""
        tier, _ = load(BuildOptions("graph"), varies=True)
        assert tier.facts.engine == "eager" and "sizes vary" in tier.facts.why, tier.facts
        tier, _ = load(BuildOptions("graph"), ShapeOptions("bucket", 4), varies=True, tabled=True)
        assert (tier.facts.engine, tier.report().misses) == ("graph", 0), (tier.report(), said)
        tier, _ = load(BuildOptions("graph"), batch=4, varies=True)
        assert (tier.facts.engine, tier.report().misses) == ("graph", 1), tier.report()  # five at once are more
    """)


@pytest.mark.gpu
def test_given_a_model_that_waits_when_a_process_has_found_out_then_the_next_runs_it_in_eager_and_says_where(
    run,
):
    found = run("""
        import os
        try:
            load(BuildOptions("graph"), waits=True)
        except CaptureFailed as error:
            print(error.is_known, error, flush=True)
            os._exit(0)
    """)
    assert found.startswith("True it cannot be captured as a CUDA graph: "), found
    run("""
        tier, _ = load(BuildOptions("graph"), waits=True)
        assert tier.facts.engine == "eager" and "no CUDA graph: it cannot be captured" in tier.facts.why, tier.facts
        tier, loader = load(waits=True)
        assert (tier.facts.engine, loader.missing) == ("eager", ["full"]), tier.facts
    """)


@pytest.mark.gpu
def test_given_auto_when_everything_is_built_then_graphs_are_timed_too_and_the_chosen_way_runs(run):
    run("""
        from torchperf_ros.engines import package_build

        package_build.open_adapter = lambda path, options, on: Own(options, on)
        news = []
        job = {"adapter": "own:Own", "options": {}, "device": "cuda:0", "threads": 1, "tiers": ["full"],
               "build": [BuildOptions("auto").as_dict()], "cache_dir": sys.argv[1], "cache_mib": 4096}
        assert package_build.do_job(job, lambda kind, **fields: news.append((kind, fields))), news
        (built,) = [fields for kind, fields in news if kind == "built"]
        for way in ("eager", "graph", "aoti", "aoti cuda_graphs"):
            assert f"{way} " in built["choice"], built["choice"]
        tier, loader = load()
        assert not loader.missing and tier.facts.choice == built["choice"], (tier.facts, said)
        assert tier.facts.engine == built["engine"].split()[0]
    """)


@pytest.mark.gpu
def test_given_auto_and_sizes_that_vary_when_graph_is_chosen_then_it_runs_where_sizes_are_known_and_else_the_next_best(
    run,
):
    run("""
        from torchperf_ros.engines.package import ways_of
        from torchperf_ros.engines.built_tier import BuiltTier
        from torchperf_ros.workers.package_manifest import EngineChoice
        from torchperf_ros.workers.package_cache import open_cache

        adapter = Own({"varies": True}, device.device)
        example = adapter.example_inputs("full")
        tier = BuiltTier(build_model(adapter, "full").to(device.device), example, adapter.dynamic_dims(), device.device)
        ways, identity = ways_of(tier, BuildOptions("auto"))
        assert {"graph", "aoti"} <= set(ways) and "compile reduce-overhead" not in ways, ways
        choice = EngineChoice("graph", {"graph": [1.0, 1.0], "eager": [2.0, 2.0]}, {"aoti": "cannot"})
        cache = open_cache(sys.argv[1], 4096)
        with cache.building(identity, "choice"):
            cache.keep_choice(identity, choice)
        for shapes, engine in ((ShapeOptions("bucket", 4), "graph"), (ShapeOptions("dynamic"), "eager")):
            tier, loader = load(shapes=shapes, varies=True)
            found = tier.facts.engine, tier.facts.why, loader.missing
            assert found == (engine, "", []), (shapes, found)
        tier, loader = load(batch=4, varies=True)
        assert (tier.facts.engine, loader.missing) == ("graph", []), tier.facts
    """)


def test_given_a_model_that_cannot_be_captured_when_the_cache_is_listed_then_it_is_named_and_all_forgets_it(
    record, tmp_path, capsys
):

    fail(record, RuntimeError())
    from torchperf_ros.tools import model_commands

    model_commands.cache(cache_dir=str(tmp_path / "cache"))
    assert "runs without a CUDA graph: it cannot be captured: mask.item()" in capsys.readouterr().out
    model_commands.cache(remove="all", cache_dir=str(tmp_path / "cache"))
    assert record().why_not() == ""
