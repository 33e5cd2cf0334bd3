import gc
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from torchperf_ros.engines.package_build import do_job
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.compile_process import CompileProcess
from torchperf_ros.workers.package_cache import PackageCache, open_cache
from torchperf_ros.workers.package_manifest import manifest_path

PATIENCE_S = 300.0  # a compiler's, on a machine that does other things as well


def job(cache, tiers=("full",), **changes):
    """What a compile process is told."""
    count = len(tiers)
    return {
        "adapter": "compiled_adapters:Compiled",
        "options": {},
        "device": "cpu",
        "threads": 1,
        "tiers": list(tiers),
        "build": [BuildOptions("aoti").as_dict()] * count,
        "packages": [""] * count,
        "cache_dir": str(cache),
        "cache_mib": 4096,
        "kept_mib": 256,
        **changes,
    }


def build(values):
    """Build in this process, and time what is built briefly; what it says, and whether all is there."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchperf_ros.engines.package_build._TIMING_SECONDS", 0.0)
        patch.setattr("torchperf_ros.engines.file_engines._VARIANT_SECONDS", 0.0)
        good = do_job(values, lambda kind, **fields: said.append({"kind": kind, **fields}))
    return said, good


def edit_identity(package, **changes):
    """Change what a package's manifest says that it was built from."""
    values = json.loads(manifest_path(package).read_text(encoding="utf-8"))
    values["identity"].update(changes)
    manifest_path(package).write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(autouse=True)
def restored_threads():
    """As many CPU threads as before for the next test: what runs a model sets their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def settled_engines():
    """As in a worker, where the collector looks through no compiler that earlier tests imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def adapters():
    """The module of the adapters that are compiled, under the name that it has in other processes, too."""
    folder = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        )
        yield importlib.import_module("compiled_adapters")


@dataclass(frozen=True)
class Built:
    """Packages in one cache.

    Static ones of a real compile process, and its end; a dynamic one of this process.

    Each has been compiled in one variant only, another one: the second takes seconds and says nothing new.
    """

    cache: PackageCache
    reported: dict
    end: str

    def package(self, which="static"):
        return Path(
            next(message["package"] for message in self.reported[which] if message["kind"] == "built")
        )


@pytest.fixture(scope="session")
def built(adapters, tmp_path_factory):
    folder, threads = tmp_path_factory.mktemp("some packages") / "cache", torch.get_num_threads()
    umask = os.umask(0o002)  # as many distributions have it for users with a group of their own
    with pytest.MonkeyPatch.context() as patch:  # homes of people have a space, which compilers do not take
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("a compiler")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("a temporary folder")))
        process = CompileProcess(
            job(folder, ["untraceable", "full"], options={"plain": True}), background=False
        )
    os.umask(umask)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "torchperf_ros.engines.file_engines._variants", lambda model, *_: {"frozen": (model, True)}
            )
            dynamic, _ = build(job(folder, options={"dynamic": True}))
        static, end = list(process.messages(PATIENCE_S)), process.death_reason()
    finally:
        process.close()
        torch.set_num_threads(threads)
    return Built(open_cache(str(folder), 4096), {"static": static, "dynamic": dynamic}, end)


@pytest.fixture
def fresh_compiler():
    """torch.compile without what earlier tests have left in it, its limits and stance put back afterwards."""
    torch.compiler.reset()
    config = torch._dynamo.config
    with config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()
