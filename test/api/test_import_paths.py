"""Modules of the user's that are called as Python's own stand in for none of these."""

import subprocess
import sys

import pytest

from torchperf_ros.api.import_paths import look_here_after_python

LOOK = """
import sys
import torchperf_ros
print(torchperf_ros.api.import_paths.is_own_process())
"""


@pytest.mark.parametrize("add", [False, True])
def test_given_a_path_when_ordered_then_the_present_folder_follows_python_and_precedes_what_is_installed(
    add, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    installed = [each for each in sys.path if each not in {"", str(tmp_path)}]
    monkeypatch.setattr(sys, "path", installed if add else ["", *installed, str(tmp_path)])
    look_here_after_python(add=add)
    assert sys.path.count(str(tmp_path)) == 1
    assert "" not in sys.path
    place = sys.path.index(str(tmp_path))
    assert not any("site-packages" in each for each in sys.path[:place])
    assert any(each.endswith("lib-dynload") for each in sys.path[:place])


def test_given_files_called_as_some_of_pythons_when_a_command_runs_there_then_they_do_not_stand_in(
    tmp_path,
):
    for name in ("queue", "logging"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "import queue, logging\nvalue = queue.Queue, logging.getLogger\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "torchperf_ros.tools", "check", "mine:Nothing"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "mine has no Adapter class 'Nothing'" in done.stdout, done


def test_given_a_program_of_somebody_else_when_it_imports_the_package_then_its_path_is_its_own(tmp_path):
    (tmp_path / "program.py").write_text(LOOK, encoding="utf-8")
    command = [sys.executable, "-m", "program"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "False\n"
