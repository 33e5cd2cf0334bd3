"""Where a user's own files lie (XDG base directory specification)."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path


def user_folder(variable: str, below_home: str, environment: Mapping[str, str] = os.environ) -> Path:
    """`torchperf_ros` in the folder that the environment names, else below the user's home.

    Never where others may write: packages that lie there are run, and evidence shows what a camera saw.

    Args:
        variable: for example `XDG_CACHE_HOME`; one that is not absolute counts as unset.
        below_home: for example `.cache`.
        environment: the process's, or a test's.
    """
    base = environment.get(variable, "")
    folder = Path(base) if base.startswith("/") else Path(environment.get("HOME") or _home()) / below_home
    return folder / "torchperf_ros"


def _home() -> str:
    """From the list of users; "/" for a user that is not in it, as in containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"
