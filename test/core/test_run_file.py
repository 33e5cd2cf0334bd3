"""A run in a file: what it holds comes back, what is no run is named."""

import os

import numpy as np
import pytest

from torchperf_ros.core.frame_table import FRAME
from torchperf_ros.core.run_file import Run, RunFileError, read_run, write_run


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_given_a_path_that_is_not_utf_8_when_a_run_names_it_then_it_is_written_and_comes_back(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = os.fsdecode(b"/logs/caf\xe9 \xff") + "/\N{GREEK SMALL LETTER MU}"
    run = Run({"stages": [{"name": "perception"}], "log": {"path": path}}, {"perception": np.zeros(2, FRAME)})
    write_run(run, tmp_path / f"run{suffix}")
    assert read_run(tmp_path / f"run{suffix}").summary["log"]["path"] == path


@pytest.mark.parametrize(
    "stages",
    [
        '["x"]',
        '"x"',
        "[{}]",
        '[{"name": "a", "frames": null}]',
        '[{"name": "a", "frames": {"seq": [1%s]}}]' % ("0" * 30),
    ],
    ids=["text", "letters", "nothing", "no frames", "beyond int64"],
)
def test_given_stages_that_are_none_when_read_then_the_error_names_the_file(tmp_path, stages):
    path = tmp_path / "run.json"
    path.write_text(f'{{"v": 1, "kind": "run", "stages": {stages}}}', encoding="utf-8")
    with pytest.raises(RunFileError, match=rf"run {path}: is no run that"):
        read_run(path)
