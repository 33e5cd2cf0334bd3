"""Where modules are found: those of this package's own processes, and those of earlier versions' import paths.

Import paths of earlier versions work for one release and warn.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Final


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


_MOVED: Final = {
    "torchperf_ros.core": "torchperf_ros.api",
    "torchperf_ros.core.errors": "torchperf_ros.api.errors",
    "torchperf_ros.frame": "torchperf_ros.api",
    "torchperf_ros.frame.errors": "torchperf_ros.api.errors",
    "torchperf_ros.config": "torchperf_ros.api",
    "torchperf_ros.config.image_pixels": "torchperf_ros.api.pixels",
    "torchperf_ros.config.message_types": "torchperf_ros.api.messages",
    "torchperf_ros.model": "torchperf_ros.api",
    "torchperf_ros.model.adapter": "torchperf_ros.api.adapter",
    "torchperf_ros.model.history_buffer": "torchperf_ros.api.histories",
    "torchperf_ros.worker.adapter": "torchperf_ros.api.adapter",
    "torchperf_ros.worker.history_buffer": "torchperf_ros.api.histories",
}


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module of today under its old name. The last finder, so imports that succeed never ask it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that has moved; None for any other."""
        if fullname not in _MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname.count(".") == 1)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """An empty module, which `exec_module` fills."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Take over the names of the module of today, and warn about the old one."""
        today = importlib.import_module(_MOVED[module.__name__])
        if module.__name__.count(".") > 1:
            text = (
                f"{module.__name__} is now private and goes with the next release;"
                " write `from torchperf_ros import ...`"
            )
            # `warnings` skips the import machinery between here and the user's line.
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        names = ("__name__", "__spec__", "__loader__", "__package__", "__path__")
        module.__dict__.update({name: each for name, each in vars(today).items() if name not in names})
