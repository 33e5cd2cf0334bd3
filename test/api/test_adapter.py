import sys
import textwrap

import pytest
import torch

from torchperf_ros.api.adapter import load_adapter
from torchperf_ros.api.errors import AdapterError


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module that can be imported by name."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


MODULE = """
    from torchperf_ros.api.adapter import Adapter

    class First(Adapter):
        def __init__(self, options, device): pass
        def build(self, tier): pass
        def example_inputs(self, tier): return ()
        def preprocess(self, messages): return ()
        def postprocess(self, outputs, messages): pass

    class Second(First):
        pass

    class Other:
        pass

    value = 7
"""


@pytest.mark.parametrize(
    ("path", "example"),
    [
        *((path, r"torchperf_ros\.") for path in ("module", "module:", ":Class")),
        *(
            (path, r"my_robot\.depth:Depth")
            for path in ("my_robot/depth.py:Depth", "/my_robot/depth:Depth", "my_robot.depth.py:Depth")
        ),
    ],
)
def test_given_a_path_of_another_form_or_of_a_file_when_loaded_then_the_error_shows_the_form(path, example):
    with pytest.raises(AdapterError, match=f"does not have the form module:Class, for example {example}"):
        load_adapter(path)


@pytest.mark.parametrize("name", ["Missing", "Other", "Adapter"])
def test_given_a_name_that_is_no_adapter_when_loaded_then_the_error_lists_those_there_are(
    write_module, name
):
    write_module("more_adapters", MODULE)
    if name == "Adapter":
        pytest.raises(TypeError, load_adapter("more_adapters:Adapter"), {}, torch.device("cpu"))
        return
    with pytest.raises(AdapterError, match=rf"has no Adapter class '{name}'; it has \['First', 'Second'\]"):
        load_adapter(f"more_adapters:{name}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit('no weights')", r"SystemExit: no weights \(failing_adapters.py:1: raise"),
        (
            "import sys\nsys.exit()",
            r"SystemExit: None \(failing_adapters.py:2: sys.exit\(\)\); raise an error instead",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_given_a_module_that_fails_to_import_when_loaded_then_the_error_says_what_it_raised(
    write_module, text, said
):
    write_module("failing_adapters", text)
    with pytest.raises(AdapterError, match=f"importing failing_adapters (failed|ends the program): {said}"):
        load_adapter("failing_adapters:Any")
