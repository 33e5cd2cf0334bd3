"""Entry of the process that measures one case of `torchperf bench model`.

    python -m torchperf_ros.analysis.bench_case_main NEWS        (descriptor for one JSON object per line)

Job on stdin: see `measure_case`. It says `step` (text), and at last one of `figures` (figures), `error` (text: this
case cannot be measured) or `failed` (text: the adapter or the device cannot be used at all).
"""

import json
import os
import sys
from typing import Any

from torchperf_ros.core.errors import AdapterError, ConfigError, TorchperfError
from torchperf_ros.worker.detachment import detach_from_node


def main() -> int:
    """Do the job. Returns 0, or 1 where there are no figures."""
    detach_from_node()
    news = os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(news.fileno(), False)

    def say(kind: str, **fields: object) -> None:
        news.write(json.dumps({"kind": kind, **fields}) + "\n")

    job: dict[str, Any] = json.load(sys.stdin)
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
