"""What runs a model, on a GPU: session, tier loader, engines, shapes, stage. Each in a process of its own.

A kernel that fails takes its process's context with it, and a capture that fails whatever comes after.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICE = "cuda:0"

LOADED = """
    import gc
    import sys
    import torch
    from torch.utils._pytree import tree_map_only
    from compiled_adapters import Compiled
    from torchperf_ros.settings.build_options import BuildOptions
    from dataclasses import replace
    from torchperf_ros.settings.build_options import ShapeOptions
    from torchperf_ros.engines.device import Device, choose_device
    from torchperf_ros.engines.package_build import do_job
    from torchperf_ros.engines.parity import measure, random_inputs
    from torchperf_ros.worker.tier_loader import TierLoader
    from torchperf_ros.workers.worker_setup import WorkerSetup

    DEVICE, CACHE = sys.argv[1:]
    device, said = Device(choose_device(DEVICE), 1), []
    SETUP = WorkerSetup("tested", "", {}, ("full",), (), ("",), (0,), (-1,), cache_dir=CACHE, cache_mib=4096)
    EXAMPLE = Compiled({}, device.device).example_inputs("full")

    def load(options, shapes=ShapeOptions(), dynamic=False):
        setup = replace(SETUP, build=(options,), shapes=shapes)
        with torch.inference_mode():
            return TierLoader(Compiled({"dynamic": dynamic}, device.device), setup, device, said.append).load(0)

    def agrees(tier, batch, limit=1e-3):
        eager = Compiled({}, torch.device("cpu")).build("full").eval()
        with torch.inference_mode():
            inputs = random_inputs(EXAMPLE, batch, {0: {0: (batch, batch)}, 1: {0: (batch, batch)}})
            found = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu().clone(), tier.run(inputs)[0])
            parity = measure(eager(*inputs), found)
        assert parity.relative_l2 < limit, (tier.facts, batch, parity)
"""


@pytest.fixture
def run(tmp_path):
    """Runs code in a new process, after what `LOADED` gives it; it has to come to its end."""

    def run(code, before=LOADED):
        path = os.pathsep.join([str(HERE), str(ROOT), str(ROOT / "test" / "worker")])
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(before) + textwrap.dedent(code), DEVICE, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    return run


def test_given_precisions_and_graphs_when_a_tier_is_loaded_then_it_is_what_was_asked_for_and_agrees(run):
    run("""
        graphs = device.is_cuda
        limits = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 5e-2}
        for precision in limits if graphs else ("fp32", "bf16"):
            for cuda_graphs in (False, True) if graphs else (False,):
                tier = load(BuildOptions(precision=precision, cuda_graphs=cuda_graphs))
                assert tier.facts.why == "", tier.facts
                for batch in (1, 1, 3):
                    agrees(tier, batch, limits[precision])
    """)


def test_given_packages_when_built_and_loaded_then_they_run_with_and_without_graphs(run):
    run("""
        options = BuildOptions("aoti")
        job = {"adapter": "compiled_adapters:Compiled", "options": {}, "device": DEVICE, "threads": 1,
               "tiers": ["full"], "build": [options.as_dict()], "packages": [""], "cache_dir": CACHE, "cache_mib": 4096}
        news = []
        assert do_job(job, lambda kind, **fields: news.append((kind, fields))), news
        for cuda_graphs in (False, True) if device.is_cuda else (False,):
            tier = load(BuildOptions("aoti", cuda_graphs=cuda_graphs))
            assert (tier.facts.engine, tier.facts.why) == ("aoti", ""), tier.facts
            for batch in (1, 1, 2):
                agrees(tier, batch)
            assert (tier.report().hits, tier.report().misses) == (2, 1)
    """)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_given_engine_compile_when_sizes_vary_then_every_size_agrees_and_none_is_compiled_again(run, mode):
    run(f"""
        tier = load(BuildOptions("compile", mode="{mode}"), ShapeOptions("dynamic"), dynamic=True)
        assert (tier.facts.engine, tier.facts.why) == ("compile", ""), tier.facts
        torch.compiler.set_stance("fail_on_recompile")
        for batch in (1, 8, 2, 5, 3, 8):
            agrees(tier, batch)
        assert tier.report().recompiles == 0
    """)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_given_int8_by_torchao_when_a_tier_is_loaded_then_it_is_quantised_and_agrees(run):
    run("""
        for precision in ("int8_weight", "int8_dynamic"):
            tier = load(BuildOptions(precision=precision))
            assert (tier.facts.engine, tier.facts.why) == ("eager", ""), tier.facts
            for batch in (1, 3, 32):
                agrees(tier, batch, 5e-2)
            assert any("int8" in repr(kept).lower() for kept in gc.get_objects() if isinstance(kept, torch.nn.Linear))
    """)


def test_given_parts_when_compiled_then_the_rest_runs_in_eager_and_answers_agree(run):
    run("""
        tier = load(BuildOptions("compile", parts="layers.0, layers.2"))
        assert (tier.facts.engine, tier.facts.why, tier.facts.graphs) == ("compile", "", 2), tier.facts
        torch.compiler.set_stance("fail_on_recompile")
        for _ in range(3):
            agrees(tier, 1)
        assert tier.report().recompiles == 0
    """)


def test_given_two_contexts_when_each_allocates_then_each_counts_its_own_memory_and_both_see_it_taken(run):
    run("""
        import subprocess, textwrap

        MIB = 1 << 20
        OTHER = '''
            import sys, torch
            from torchperf_ros.engines.device import Device, choose_device
            device = Device(choose_device(sys.argv[1]), 1)
            kept = torch.ones(256 << 20, dtype=torch.uint8, device=device.device)
            print(device.memory_bytes().get("allocated", 0), int(kept.sum()), flush=True)
            sys.stdin.read()
        '''
        own = torch.ones(MIB, device=device.device)
        before = device.memory_bytes()
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OTHER), DEVICE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as second:
            others, found = map(int, second.stdout.readline().split())
            beside = device.memory_bytes()
            second.stdin.close()
        assert found == 256 * MIB
        if device.is_cuda:
            assert others >= 256 * MIB
            assert beside["allocated"] == before["allocated"] >= 4 * MIB
            # other tests may run on the card meanwhile
            assert beside["total"] - beside["free"] >= others + beside["reserved"]
        assert float(own.sum()) == MIB
    """)


def test_given_buckets_when_sizes_vary_then_padded_inputs_agree(run):
    run("""
        tier = load(BuildOptions(), ShapeOptions("bucket", 4), dynamic=True)
        assert tier.report().shapes == "bucket", said
        for batch in (1, 7, 3, 8, 2):
            agrees(tier, batch)
        assert tier.report().misses == 0
    """)


def test_given_a_session_when_it_serves_then_frames_errors_and_want_of_memory_are_as_on_the_cpu(run):
    run(
        """
        import sys
        from test_session import Node, text_of
        from torchperf_ros.api.outcome import Outcome

        node = Node(device=sys.argv[1]).start()
        try:
            hello = node.told()[0]
            assert hello.device == sys.argv[1], hello
            node.control.settimeout(20.0)
            assert text_of(node.ask(0, 4.0)[1]).startswith("8.0 ")
            assert node.ask(1, -3.0)[0].outcome == Outcome.INVALID
            assert node.ask(2, -2.0)[0].outcome == Outcome.ERROR
            assert text_of(node.ask(3, 4.0, tier=1)[1]).startswith("40.0 ")
        finally:
            node.close()
        node = Node("Hungry", device=sys.argv[1]).start()
        try:
            response, payload = node.ask(0, 200.0)
            assert (response.outcome, response.tier, text_of(payload).split()[0]) == (Outcome.ON_TIME, 1, "2000.0")
        finally:
            node.close()
        """,
        before="",
    )


def test_given_a_stage_when_its_worker_is_killed_then_the_standby_answers_from_the_gpu(run):
    run(
        """
        import os, signal, sys
        from pathlib import Path
        from benchmarks.rig.cuda.place import Place
        from benchmarks.rig.cuda.stages import WorkerStage
        from torchperf_ros.api.outcome import Outcome

        place = Place(sys.argv[1], 0.1, Path(sys.argv[2]))
        layers = {"layers": {"full": 2, "fast": 1}}
        stage = WorkerStage(place, "benchmarks.rig.cuda.adapter:CudaAdapter", layers, budget_ms=1000.0, hang_ms=2000.0)
        try:
            stage.start()
            workers = stage.actor.pool.workers
            stage.settle()
            assert stage.actor.pool.description.device == sys.argv[1]
            if sys.argv[1] != "cpu":
                stage.until(lambda: all(each.reported.memory_bytes for each in workers), "both report memory")
                for each in workers:  # each in a context of its own
                    memory = each.reported.memory_bytes
                    assert 0 < memory["allocated"] <= memory["reserved"] < memory["total"] - memory["free"], memory
            assert stage.ask().outcome is Outcome.ON_TIME, stage.logs
            os.kill(workers[0].pid, signal.SIGKILL)
            assert Outcome.ON_TIME in [stage.ask().outcome for _ in range(3)], stage.logs
            stage.settle()
            assert stage.ask("out of memory").tier == 1
        finally:
            stage.actor.stop()
        """,
        before="",
    )
