"""For all tests.

Ctrl-C works, the longest files begin, and what nodes and drives write goes to a folder of their own.
"""

import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy.fft  # noqa: F401 - here, as `pytester` forgets what is imported within, and it cannot be loaded again
import pytest
from hypothesis import HealthCheck, settings

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.stage.frame import Answer, Frame, Origin

# Others use this machine as well: how long an example takes says nothing. The examples are the same in
# every run, so that a test fails with the change that broke it; `--hypothesis-profile search` draws new
# ones. Hypothesis would draw constants out of our modules as well: those that earlier tests have imported.
pytest.MonkeyPatch().setattr(
    "hypothesis.internal.conjecture.providers.is_local_module_file", lambda path: False, raising=False
)
settings.register_profile(
    "search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("repeatable", settings.get_profile("search"), derandomize=True)
settings.load_profile("repeatable")

MS = 1_000_000
PR_SET_CHILD_SUBREAPER = 36
FIRST = (
    "test/test_style.py",
    "test/engines/test_package_build.py",
    "test/stage/test_compiled_stage.py",
    "test/benchmarks/test_smoke_beside.py",
    "test/node/test_candidate_live.py",
    "test/node/test_emergency_lane.py",
    "test/replay/test_batch.py",
    "test/test_docs.py",
    "test/test_gate_workflow.py",
    "test/tools/test_tune.py",
    "test/tools/demo/test_drive.py",
    "test/train/test_run.py",
    "test/world/",
)
"""The files that take longest begin, so that no process is left with one of them at the end."""
PACKAGES = tuple(f"test/engines/test_{name}.py" for name in ("package_build", "package", "tier_loader"))
"""Files that read the same compiled packages: one process has them, and builds the packages once."""
LAST = ("test/benchmarks/test_smoke.py", "test/node/test_watch_live.py")
"""The benchmarks run beside each other and keep both cores busy; the watch counts each step that latencies cause."""


def pytest_configure():
    """Let signals reach what tests start, also where a shell runs them in the background; compile quickly.

    What is printed has one form.

    Such a shell has its commands ignore SIGINT and SIGQUIT, and what they start inherits it.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # By these, of a terminal or of a machine for continuous integration, rich and Typer choose width and colours.
    for name in (
        "COLUMNS",
        "FORCE_COLOR",
        "GITHUB_ACTIONS",
        "LINES",
        "NO_COLOR",
        "PY_COLORS",
        "TTY_COMPATIBLE",
    ):
        os.environ.pop(name, None)
    # Packages wait for the C++ compiler. Headers compiled ahead pay only for more packages than are built
    # here. torch reads both when it is imported.
    os.environ |= {
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Have the garbage collector leave alone what is imported and collected: all of it stays.

    Looking through it takes a second, at each of its rounds and at each `gc.collect()` of what is tested.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Have the longest begin, and skip what needs a GPU where there is none."""
    if needing := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        for item in () if torch.cuda.is_available() else needing:
            item.add_marker(pytest.mark.skip(reason="torch.cuda is not available"))
    items.sort(key=lambda item: (item.nodeid.startswith(LAST), not item.nodeid.startswith(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 3`: whole files side by side, in their order.

    With `--dist worksteal`, which `bench cuda` asks for, tests of one file run side by side, too.
    """
    if config.getoption("dist") == "worksteal":
        return None
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return PACKAGES[0] if nodeid.startswith(PACKAGES) else super()._split_scope(nodeid)

        def remove_node(self, node):
            # Of a process that crashed, what it had done would be queued again as well, without
            # an end.
            units = self.assigned_work[node]
            self.assigned_work[node] = {
                scope: unit for scope, unit in units.items() if not all(unit.values())
            }
            return super().remove_node(node)

    # the first files are not those with the most tests, but with the longest
    config.option.loadscopereorder = False
    return WholeFiles(config, log)


@pytest.fixture(autouse=True)
def own_scheduling():
    """A command that ran in this process, a replay for example, leaves no real-time priority behind.

    Nor does one that counts what its processes use make this one take in orphans, which nobody here would
    wait for.
    """
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """`XDG_STATE_HOME` for this process and all that it starts, and one folder for torch's compilers.

    Each folder of theirs has what is compiled compiled anew.
    """
    folder = tmp_path_factory.getbasetemp()
    compiler = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiler"
    compiler.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiler))
        yield


def _python(code, *words, **environment):
    command = [sys.executable, "-c", textwrap.dedent(code), *words]
    how = {"cwd": Path(__file__).parents[1], "env": os.environ | environment, "timeout": 250}
    done = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def python():
    """Runs code in a fresh interpreter of this checkout, which has to end well; what it prints."""
    return _python


@contextlib.contextmanager
def _limited(name, most):
    what = getattr(resource, f"RLIMIT_{name}")
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@pytest.fixture
def limited():
    """In its block this process has a limit: `limited("FSIZE", 100)` for files, as on a full disk."""
    return _limited


@pytest.fixture
def make_frame():
    def make(seq=0, *, deadline_ns=100 * MS, received_ns=0, stamp_ns=0, age_ms=math.nan, data=b""):
        return Frame(seq, data, stamp_ns, age_ms, received_ns, deadline_ns, Origin(received_ns, age_ms))

    return make


@pytest.fixture
def make_answer(make_frame):
    def make(
        outcome=Outcome.ON_TIME,
        fallback=None,
        *,
        seq=0,
        now_ns=0,
        total_ms=10.0,
        lateness_ms=-1.0,
        reason="",
    ):
        return Answer(
            make_frame(seq),
            outcome,
            fallback,
            reason,
            tier=0,
            wait_ms=0.5,
            total_ms=total_ms,
            budget_ms=50.0,
            lateness_ms=lateness_ms,
            published_ns=now_ns,
        )

    return make
