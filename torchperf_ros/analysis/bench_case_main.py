"""Entry of the process that measures one case of `torchperf bench model`.

    python -m torchperf_ros.analysis.bench_case_main NEWS        (descriptor for one JSON object per line)

Job on stdin: see `measure_case`. It says `step` (text), and at last one of `figures` (figures), `error` (text: this
case cannot be measured) or `failed` (text: the adapter or the device cannot be used at all).
"""

import sys

from torchperf_ros.core.errors import AdapterError, ConfigError, TorchperfError
from torchperf_ros.worker.job_process import take_job


def main() -> int:
    """Do the job. Returns 0, or 1 where there are no figures."""
    job, say = take_job()
    try:
        from torchperf_ros.analysis.bench_measure import measure_case  # imports torch, which takes seconds

        say("figures", figures=measure_case(job, lambda text: say("step", text=text)))
    except (AdapterError, ConfigError) as error:
        say("failed", text=str(error))
        return 1
    except TorchperfError as error:
        say("error", text=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
