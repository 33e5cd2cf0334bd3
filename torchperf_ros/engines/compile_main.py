"""Entry of the process that compiles.

Builds packages, or does another job. The job is a JSON object on stdin, in one line.

    python -m torchperf_ros.engines.compile_main NEWS        (descriptor for one JSON object per line)

Job: `adapter`, `options`, `device`, `threads`; `tiers`, and for each its `build` (a `BuildOptions`) and
`packages` (the user's file in place of the adapter's model, or ""); `guessed` (no tiers were
named: those that the adapter builds); `cache_dir`, `cache_mib`; `out` (a folder to write `<tier>.pt2` to instead,
or absent); `dry_run` (only plan what would be built); `force` (build even what is there); `background`;
`lacked` (what had not enough memory to be captured or timed, by key, and why: it is left out). For another
job `does` is the module whose `do_job` does it; with `fresh` compilers keep nothing beyond it.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.workers.compile_process import AGAIN
from torchperf_ros.workers.package_cache import (
    VARIABLE,
    NoRoom,
    clear_compiler_cache,
    compile_in,
    use_compiler_cache,
)
from torchperf_ros.workers.process_setup import detach_from_node

_LOWEST = 19
_BUILDS_PACKAGES = "torchperf_ros.engines.package_build"


def main() -> int:
    """Do the job. Returns 0, or 1 if a tier failed or none could be tried."""
    detach_from_node()
    # Standard output is the adapter's to print to.
    news = os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(news.fileno(), False)
    job = json.loads(sys.stdin.readline())

    def say(kind: str, **fields: object) -> None:
        news.write(json.dumps({"kind": kind, **fields}) + "\n")

    if job["background"]:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    lock, chosen = None, os.environ.get(VARIABLE, "")  # the lock is held until the process ends
    os.umask(os.umask(0o022) | 0o022)  # the node refuses a package that others can write
    try:
        if job.get("fresh"):
            compile_in(os.environ["TMPDIR"])
        else:
            lock = use_compiler_cache(job.get("cache_dir", ""), job.get("cache_mib", 1024) << 20)
        # What is imported stays: to look through it again and again takes part of a second.
        gc.disable()
        # It imports torch, which takes seconds.
        work = importlib.import_module(job.get("does", _BUILDS_PACKAGES))
        gc.freeze()
        gc.enable()
        return 0 if work.do_job(job, say) else 1
    except TorchperfError as error:
        # Of a capture or a timing: the next process knows of it, or is handed it.
        lacked = getattr(error, "lacked", "")
        if lacked or getattr(error, "is_known", False):
            say(AGAIN, text=str(error), lacked={lacked: str(error)} if lacked else {})
            news.flush()
            os._exit(1)
        no_room = isinstance(error, NoRoom)
        if no_room and lock is not None:
            lock.close()
            os.environ[VARIABLE] = chosen
            clear_compiler_cache(job.get("cache_dir", ""))
        say("failed", tier=", ".join(job["tiers"]), text=str(error), unusable=True, no_room=no_room)
    except (Exception, SystemExit) as error:  # the process's boundary; a user's adapter may call exit()
        text = f"{type(error).__name__}: {error}"
        say("failed", tier=", ".join(job["tiers"]), text=text, detail=traceback.format_exc())
    return 1


if __name__ == "__main__":
    sys.exit(main())
