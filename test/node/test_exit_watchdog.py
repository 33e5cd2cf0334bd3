"""A process that is stuck in C with the interpreter lock held still ends, with the status that it was to have."""

import subprocess
import sys
import time

import pytest

ENDS = {
    "stuck in C": ("ctypes.PyDLL(None).pause()", 3),
    "stuck while the interpreter ends": ("atexit.register(ctypes.PyDLL(None).pause)", 3),
    "not stuck": ("sys.exit(7)", 7),
}


@pytest.mark.parametrize("kind", ENDS)
def test_given_a_bound_when_the_process_is_to_end_then_it_has_ended_by_then(kind):
    last, status = ENDS[kind]
    imports = "import atexit, ctypes, sys; from torchperf_ros.node.middleware import end_within"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", f"{imports}; end_within(1, 3); {last}"], timeout=60.0, check=False)
    assert done.returncode == status
    assert kind == "not stuck" or time.monotonic() - began >= 1.0
