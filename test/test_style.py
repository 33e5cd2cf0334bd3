"""Style and types are tests like any other, so that one count at the end says it all."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("check", [["ruff", "check"], ["mypy"]], ids=lambda check: check[0])
def test_code_keeps_the_rules_of_pyproject(check):
    done = subprocess.run(
        [sys.executable, "-m", *check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(check)} found:\n{done.stdout}{done.stderr}"
