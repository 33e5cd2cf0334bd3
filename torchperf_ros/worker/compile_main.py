"""Entry of the compile process: builds, checks, times and stores packages. Its job is a JSON object on stdin.

    python -m torchperf_ros.worker.compile_main NEWS        (descriptor for one JSON object per line)

Job: `adapter`, `options`, `device`, `threads`; `tiers`, and for each its `build` (a `BuildOptions`) and `packages` (the
user's file in place of the adapter's model, or ""); `cache_dir`, `cache_mib`; `out` (a folder to write `<tier>.pt2` to
instead, or absent); `dry_run` (only say what would be built); `force` (build even what is there); `background`.
"""

import contextlib
import os
import sys
import traceback

from torchperf_ros.core.compiler_cache import use_compiler_cache
from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.worker.job_process import take_job

_LOWEST = 19


def main() -> int:
    """Do the job. Returns 0, or 1 if a tier failed or none could be tried."""
    job, say = take_job()
    if job["background"]:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    kept = use_compiler_cache(job.get("cache_dir", ""), job.get("cache_mib", 4096) << 20)
    try:
        from torchperf_ros.worker.package_build import build_all  # imports torch, which takes seconds

        return 0 if build_all(job, say) else 1
    except TorchperfError as error:
        say("failed", tier=", ".join(job["tiers"]), text=str(error), unusable=True)
    except Exception as error:  # the process's boundary
        text = f"{type(error).__name__}: {error}"
        say("failed", tier=", ".join(job["tiers"]), text=text, detail=traceback.format_exc())
    finally:
        if kept is not None:
            kept.close()
    return 1


if __name__ == "__main__":
    sys.exit(main())
