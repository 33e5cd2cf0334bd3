"""Entry of the trial process of tuning: tries one way to run a tier's model, or says what the model is.

    python -m torchperf_ros.optimize.tune.trial_main NEWS        (descriptor for one JSON object per line)

Job: `adapter`, `options`, `device`, `tier`, `folder` (for what compilers keep and all that is temporary), `started_ns`
(when the process was started, by the monotonic clock); for a trial `candidate` (see `Candidate`), `reference_threads`,
`seconds` (of measuring, for each side) and `hopeless_ratio` (or null); for the facts `others` (more tiers).

It says `step` (text), and at last one of `facts` (facts), `trial` (outcome, reason, figures) or `failed` (text: the
adapter cannot be used at all).
"""

import os
import sys

from torchperf_ros.engines.compile_main import take_job
from torchperf_ros.frame.errors import TorchperfError
from torchperf_ros.packages.package_cache import VARIABLE


def main() -> int:
    """Do the job. Returns 0, or 1 if the adapter cannot be used."""
    job, say = take_job()
    os.environ[VARIABLE] = os.environ["TMPDIR"] = job["folder"]
    try:
        from torchperf_ros.optimize.tune.trial_run import facts_of, run_trial  # imports torch, which takes seconds

        if job.get("candidate") is None:
            say("facts", facts=facts_of(job))
        else:
            say("trial", **run_trial(job, lambda text: say("step", text=text)))
    except TorchperfError as error:
        say("failed", text=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
