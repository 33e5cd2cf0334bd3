"""The names that adapters import, and the paths of earlier versions."""

import pytest

import torchperf_ros
from torchperf_ros.api.import_paths import _MOVED

PUBLIC = ["Adapter", "BadInput", "HistoryBuffer", "Received", "message_class", "pixels"]


def test_given_the_package_when_its_names_are_listed_then_they_are_those_of_the_contract():
    assert sorted(torchperf_ros.__all__) == PUBLIC
    assert all(callable(getattr(torchperf_ros, name)) for name in PUBLIC)


def test_given_a_name_that_is_not_there_when_asked_for_then_the_error_names_it():
    with pytest.raises(AttributeError, match="has no attribute 'Adaptor'"):
        torchperf_ros.Adaptor  # noqa: B018
    with pytest.raises(ImportError, match="Adaptor"):
        from torchperf_ros import Adaptor  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"torchperf_ros\.nothing"):
        from torchperf_ros.nothing import Nothing  # noqa: F401


def test_given_a_fresh_interpreter_when_the_package_is_imported_then_nothing_heavy_is_loaded(python):
    loaded = python("import sys, torchperf_ros; print(*sys.modules)").split()
    assert not {"torch", "rclpy", "numpy", "rosbags"} & set(loaded)
    errors_only = python("import sys; from torchperf_ros import BadInput; print(*sys.modules)").split()
    assert not {"torch", "rclpy", "numpy"} & set(errors_only)


IMPORTS_ALL = """
import importlib, sys, torchperf_ros, warnings
for old in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        exec(f"from {old} import *; import {old}", {})
    mine = [each for each in heard if "torchperf_ros" in str(each.message)]
    module = importlib.import_module(old)
    todays = [name for name in torchperf_ros.__all__ if hasattr(module, name)]
    same = all(getattr(module, name) is getattr(torchperf_ros, name) for name in todays)
    print(len(mine), mine[0].category.__name__, mine[0].filename, module.__name__, same)
"""


def test_given_old_paths_when_imported_then_each_has_todays_names_and_warns_at_the_users_line(python):
    old_ones = [name for name in _MOVED if name.count(".") > 1]
    lines = python(IMPORTS_ALL, *old_ones).split()
    assert lines == [
        word for old in old_ones for word in ("1", "DeprecationWarning", "<string>", old, "True")
    ]
