"""What every process with a job does first: leave the node's priority, take the job, and have somewhere to speak."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from torchperf_ros.core.detachment import detach_from_node

Say = Callable[..., None]


def take_job() -> tuple[dict[str, Any], Say]:
    """The job, a JSON object on stdin, and `say(kind, **fields)`, which writes one JSON object per line.

    The first argument of the process is the descriptor that it speaks on; stdout is left to whoever prints.
    """
    detach_from_node()
    news = os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(news.fileno(), False)

    def say(kind: str, **fields: object) -> None:
        news.write(json.dumps({"kind": kind, **fields}) + "\n")

    return json.load(sys.stdin), say
