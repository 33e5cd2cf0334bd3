"""The layers of the package: who may import whom, by reading the files and by asking fresh interpreters."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchperf_ros"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = (
    "api",
    "settings",
    "safety",
    "workers",
    "stage",
    "engines",
    "worker",
    "observe",
    "node",
    "replay",
    "models",
    "tools",
    "fleet",
    "world",
    "train",
)
"""From the bottom to the top: a room imports those before it, and none after it."""
APART = {"node": {"engines", "worker"}, "observe": {"engines", "worker"}}
"""Rooms below that a room must not import all the same: they load torch."""
NODE_SIDE = ("settings", "safety", "workers", "stage", "observe")
MAY_IMPORT_TORCH = {"api", "engines", "worker", "models", "tools", "train"}
ENGINE_LIBRARIES = {"onnxruntime", "onnx", "openvino", "torch_tensorrt"}
MAY_IMPORT_RCLPY = {"node", "replay", "observe", "tools"}


def layer(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@functools.cache
def imported(path):
    """Every module that a file imports, wherever in it, with line numbers; relative ones made absolute."""
    package, found = ["torchperf_ros", *path.relative_to(PACKAGE).parts[:-1]], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from torchperf_ros import model` imports a layer, too
            found += [
                (name, node.lineno)
                for name in (module, *(f"{module}.{alias.name}" for alias in node.names))
            ]
    return found


def room_of(module):
    return module.removeprefix("torchperf_ros.").partition(".")[0]


def test_given_the_package_when_searched_then_its_rooms_are_those_of_the_table():
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == set(ROOMS)
    assert len(FILES) > 40


@pytest.mark.parametrize("name", ROOMS)
def test_given_a_room_when_its_imports_are_read_then_it_imports_only_rooms_below(name):
    may = {*ROOMS[: ROOMS.index(name) + 1], "__version__"} - APART.get(name, set())
    forbidden = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in FILES
        if layer(path) == name
        for module, line in imported(path)
        if module.startswith("torchperf_ros.") and room_of(module) not in may
    ]
    assert forbidden == []


@pytest.mark.parametrize(
    ("library", "may"),
    [
        ("torch", MAY_IMPORT_TORCH),
        ("torchvision", MAY_IMPORT_TORCH),
        ("rclpy", MAY_IMPORT_RCLPY),
        *((library, {"engines"}) for library in sorted(ENGINE_LIBRARIES)),
    ],
)
def test_given_a_heavy_library_when_imports_are_read_then_only_its_layers_import_it(library, may):
    forbidden = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in FILES
        if layer(path) not in may
        for module, line in imported(path)
        if module.partition(".")[0] == library
    ]
    assert forbidden == []


@pytest.fixture
def loaded_after(python):
    """Names of all modules in a fresh interpreter that has run this."""
    return lambda code: set(python(f"{code}\nimport sys\nprint(*sys.modules)").split())


@pytest.fixture
def loaded_by(loaded_after):
    return lambda *modules: loaded_after(
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    )


def modules_of(*layers):
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if layer(path) in layers
    ]


def test_given_a_fresh_interpreter_when_the_node_side_is_imported_then_torch_is_not_and_rclpy_for_listening_only(
    loaded_by,
):
    loaded = loaded_by(*modules_of(*NODE_SIDE))
    assert "torchperf_ros.settings.config" in loaded
    assert "torch" not in loaded
    assert "rclpy" not in loaded_by(*modules_of("settings", "safety", "workers", "stage"))


def test_given_a_fresh_interpreter_when_the_recorder_begins_then_nothing_long_is_imported_at_the_nodes_priority(
    loaded_by,
):
    assert loaded_by("torchperf_ros.workers.process_setup") & {"numpy", "psutil"} == set()


def test_given_a_fresh_interpreter_when_the_worker_is_imported_then_neither_rclpy_nor_an_engines_library_is_loaded(
    loaded_by,
):
    loaded = loaded_by(*modules_of("worker", "engines"))
    assert "torch" in loaded
    assert not {"rclpy", *ENGINE_LIBRARIES} & loaded


@pytest.mark.ros
def test_given_a_fresh_interpreter_when_the_node_is_imported_then_torch_is_not_loaded(loaded_by):
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    loaded = loaded_by("torchperf_ros.node.node")
    assert "rclpy" in loaded
    assert "torch" not in loaded
    assert "torchperf_ros.fleet" not in loaded  # before a parameter asks for a candidate or a plan


@pytest.mark.parametrize(("given", "is_loaded"), [({}, False), ({"rollout.vehicle": "car-7"}, True)])
def test_given_a_node_when_configured_then_roll_outs_are_loaded_where_a_parameter_says_that_one_may_come(
    loaded_after, given, is_loaded
):
    values = {"stages": ["perception"], **given}
    stages = {"perception": {"adapter": "m:C", "output": "o"}}
    loaded = loaded_after(f"""
from torchperf_ros.node.versions import VersionsOnDemand
from torchperf_ros.settings.config import node_config
VersionsOnDemand(dict, print, print, "/perf").prepared(node_config({values!r}, {stages!r}))
""")
    assert ("torchperf_ros.fleet.rollouts" in loaded) is is_loaded
