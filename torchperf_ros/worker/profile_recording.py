"""The profiler on demand: a bounded window of frames under torch.profiler, as a trace and as tables."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchperf_ros.worker.profile_tables import ProfileTables

_WARM_UP_FRAMES = 4  # back in service after a pause: their caches are cold
_FRAMES = 10


class ProfileRecording:
    """Records frames; writes `trace.json.gz` (for ui.perfetto.dev or chrome://tracing) and `profile.md`.

    The profiler's own schedule would prepare (1.6 s the first time, on two busy cores) and parse between two frames;
    here both happen in `begin` and `finish`, and between frames only what takes 0.1 to 0.3 ms.
    """

    def __init__(self, stage: str, device: torch.device) -> None:
        """Name the stage for the report."""
        self._stage, self._device = stage, device
        self._action = ProfilerAction.WARMUP
        self._frames = 0

    def begin(self) -> None:
        """Load and prepare the profiler, without its remarks on that (they would go to the log as warnings)."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profile = profile(
            activities=activities, schedule=lambda _: self._action, record_shapes=True, acc_events=False
        )
        self._profile.start()

    def frame_done(self) -> None:
        """Count it; what was run from the last warm-up frame on is recorded."""
        self._frames += 1
        if self._frames >= _WARM_UP_FRAMES:
            self._action = ProfilerAction.RECORD
            self._profile.step()

    @property
    def full(self) -> bool:
        """Whether all frames of the window were run."""
        return self._frames >= _WARM_UP_FRAMES + _FRAMES

    def finish(self, folder: Path) -> str:
        """Stop and write; the line says how much time a frame took, and where most of it went."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(folder / "trace.json.gz"))
        tables = ProfileTables(self._stage, self._profile.events() or [])
        (folder / "profile.md").write_text(tables.markdown(), encoding="utf-8")
        return tables.summary
