"""The row of `/perf/latency_stages` that a frame leaves behind."""

import math

from torchperf_ros.core.frame import Answer
from torchperf_ros.telemetry.labelled_array import LabelledArray
from torchperf_ros.telemetry.record_stream import FrameRecord

LABELS = (
    "stage", "seq", "age_ms", "wait_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms", "total_ms",
    "budget_ms", "tier", "outcome", "fallback",
)  # fmt: skip


class LatencyRecord:
    """Encodes answers of one stage, the one at `stage_index` of the parameter `stages`."""

    def __init__(self, stage_index: int) -> None:
        """Take the stage's index."""
        self.stage_index = stage_index
        self._array = LabelledArray(LABELS)

    def encode(self, answer: Answer) -> bytes:
        """CDR bytes of the row; NaN where unknown, or where no fallback was needed."""
        steps = answer.steps
        return self._array.encode(
            (
                self.stage_index, answer.frame.seq, answer.frame.age_ms, answer.wait_ms,
                steps.decode_ms, steps.preprocess_ms, steps.inference_ms, steps.postprocess_ms,
                answer.total_ms, answer.budget_ms, answer.tier if answer.tier >= 0 else math.nan,
                answer.outcome, math.nan if answer.fallback is None else answer.fallback,
            )
        )  # fmt: skip


def frame_row(record: FrameRecord) -> tuple[float, ...]:
    """The same row from what the recorder was told of the frame."""
    steps = record.steps
    return (
        record.stage, record.seq, record.age_ms, record.wait_ms,
        steps.decode_ms, steps.preprocess_ms, steps.inference_ms, steps.postprocess_ms,
        record.total_ms, record.budget_ms, record.tier if record.tier >= 0 else math.nan,
        record.outcome, math.nan if record.fallback is None else record.fallback,
    )  # fmt: skip
