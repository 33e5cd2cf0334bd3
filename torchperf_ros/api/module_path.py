"""Where this package's own processes look for modules."""

import os
import sys


def look_here_after_python(*, add: bool = False) -> None:
    """Find modules in the folder where the program was started, but behind those of Python itself.

    `python -m` puts that folder first: a `queue.py` or `logging.py` of the user's there would stand in for
    Python's own, and torch could not be imported. `add` puts it there where it is missing.
    """
    here = {"", os.getcwd()}
    others = [each for each in sys.path if each not in here]
    if len(others) == len(sys.path) and not add:
        return
    pythons = os.path.dirname(os.__file__)  # with lib-dynload below it; site-packages comes later
    own = [
        place for place, each in enumerate(others) if each == pythons or each.startswith(f"{pythons}/lib-")
    ]
    sys.path[:] = [*others[: max(own, default=-1) + 1], os.getcwd(), *others[max(own, default=-1) + 1 :]]


def is_own_process() -> bool:
    """Whether this is `python -m torchperf_ros...`, and no program that only imports the package."""
    begun = sys.orig_argv
    return (
        "-m" in begun and "".join(begun[begun.index("-m") + 1 :][:1]).partition(".")[0] == "torchperf_ros"
    )
