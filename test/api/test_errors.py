"""The one line that is left of an error: it carries the cause, and the place in the user's code."""

import pytest

from torchperf_ros.api.errors import ConfigError, one_line

ONNX = (
    "Failed to convert the exported program to an ONNX model. \x1b[96mThis is step 3/3\x1b[0m of it. Next"
    " steps:\n- If there is a missing ONNX function, implement it.\n\n## Exception summary\n\n<class"
    " 'torch.onnx.DispatchError'>: No ONNX function found for <OpOverload(op='mylib.twice')>.\n⬆️\n"
)
OPENVINO = (
    "Check 'false' failed at src/unconverted_ops_report.cpp:151:\nFrontEnd API failed with"
    " OpConversionFailure:\nModel wasn't fully converted.\nSummary:\n-- No conversion rule found for"
    " operations: mylib.twice.default\n"
)
EXPORT = (
    "Could not guard on data-dependent expression Eq(u0, 1)\n\nThe following call raised this error:\n"
    '  File "/home/me/my_robot/depth.py", line 18, in forward\n    if x.sum() > 0:\n'
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(ONNX), "RuntimeError: No ONNX function found for <OpOverload(op='mylib.twice')>."),
        (
            RuntimeError(OPENVINO),
            "RuntimeError: No conversion rule found for operations: mylib.twice.default",
        ),
        (
            RuntimeError(EXPORT),
            "RuntimeError: Could not guard on data-dependent expression Eq(u0, 1) (depth.py:18)",
        ),
        (
            RuntimeError("Check 'false' failed at a.cpp:1:"),
            "RuntimeError: Check 'false' failed at a.cpp:1:",
        ),
        (RuntimeError("\x1b[31m red \x1b[0m"), "RuntimeError: red"),
        (RuntimeError("x" * 10_000), f"RuntimeError: {'x' * 300}"),
        (AssertionError(), "AssertionError: no reason was given"),
        (ConfigError("parameter a: wrong\nand more"), "parameter a: wrong"),
    ],
)
def test_given_an_error_of_a_library_when_cut_to_one_line_then_that_has_the_cause_and_no_escape_codes(
    error, line
):
    assert one_line(error) == line


def caught(call):
    try:
        call()
    except Exception as error:
        return one_line(error)
    raise AssertionError("nothing was raised")


def test_given_an_error_that_says_little_when_cut_to_one_line_then_the_place_that_raised_it_is_there():
    def find():
        return [1].index(3)

    assert caught(find).startswith("ValueError: ")
    assert caught(find).endswith(" (test_errors.py:61: return [1].index(3))")


def test_given_users_code_that_this_package_calls_when_it_fails_then_the_line_of_the_user_is_there():
    from torchperf_ros.engines.parity import check_engine

    def model(*inputs):
        raise RuntimeError("a text that is long enough to stand by itself, in general")

    line = caught(lambda: check_engine(model, model, (), {}, "fp32"))
    assert "by itself, in general (test_errors.py:" in line
