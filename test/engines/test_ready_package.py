"""A user's own files: real packages of the fixture `built`, and fakes where only the outputs matter."""

import hashlib
import shutil

import pytest
import torch

from torchperf_ros.engines.package import users_package
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.workers.package_manifest import PackageError, manifest_path

from .conftest import PATIENCE_S, edit_identity

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU = torch.device("cpu")
DIMS = {0: {0: (1, 8)}, 1: {0: (1, 8)}}


def example_of():
    return torch.zeros(1, 4), torch.tensor([[0, 1, 2]])


def sign(path, digest=None):
    """As `sha256sum file.pt2 > file.pt2.sha256` does."""
    digest = digest or hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n", encoding="utf-8")


@pytest.fixture
def mine(built, tmp_path):
    """Copies of the packages, as `torchperf compile -o` would have written them."""

    def copy(which="static", *, manifest=True):
        package = built.package(which)
        path = tmp_path / f"{which}.pt2"
        shutil.copy(package, path)
        if manifest:
            shutil.copy(manifest_path(package), manifest_path(path))
        return path

    return copy


@pytest.mark.parametrize(("which", "static"), [("static", True), ("dynamic", False)])
@torch.inference_mode()
def test_given_a_package_with_its_manifest_when_loaded_then_it_runs_and_its_manifest_says_for_which_sizes(
    mine, adapters, which, static
):
    runner = users_package(mine(which), None, CPU, example_of(), DIMS)
    assert runner.static is static
    assert len(runner.package.key) == 32
    with torch.inference_mode(mode=False):
        eager = adapters.Compiled({}, CPU).build("full").eval()
    check_engine(eager, runner.call, example_of(), {} if static else DIMS, "fp32")


def test_given_a_package_with_a_checksum_only_when_loaded_then_it_runs_the_examples_sizes_only(mine):
    path = mine("dynamic", manifest=False)
    sign(path)
    runner = users_package(path, None, CPU, example_of(), DIMS)
    assert runner.static


def test_given_a_package_for_other_ranges_when_loaded_then_both_are_said(mine):
    with pytest.raises(
        PackageError, match=r"dynamic dimensions \[\[0, 0, 1, 8\].*declares \[\[0, 0, 1, 16\]"
    ):
        users_package(mine("dynamic"), None, CPU, example_of(), {0: {0: (1, 16)}, 1: {0: (1, 16)}})


def test_given_no_manifest_and_no_checksum_or_another_when_loaded_then_it_is_refused_and_says_how_to_make_one(
    mine,
):
    path = mine(manifest=False)
    with pytest.raises(
        PackageError, match="neither a manifest nor static.pt2.sha256: `sha256sum static.pt2` makes"
    ):
        users_package(path, None, CPU, example_of(), {})
    for digest in ("0" * 64, " "):
        sign(path, digest)
        with pytest.raises(PackageError, match=r"has the SHA-256 .*; static.pt2.sha256 says"):
            users_package(path, None, CPU, example_of(), {})


@pytest.mark.parametrize("change", [{"torch": "1.0"}, {"signature": ["f"]}])
def test_given_a_package_for_another_torch_machine_or_signature_when_loaded_then_both_are_said(
    mine, change
):
    path = mine()
    edit_identity(path, **change)
    with pytest.raises(
        PackageError, match=rf"static.pt2 was built for .*; this is {torch.__version__[:4]}"
    ):
        users_package(path, None, CPU, example_of(), {})


def test_given_another_kind_of_file_when_loaded_then_it_says_so(tmp_path):
    path = tmp_path / "other.pt2"
    path.write_bytes(b"no archive")
    sign(path)
    with pytest.raises(PackageError, match=r"other.pt2 cannot be loaded by torch"):
        users_package(path, None, CPU, example_of(), {})


X = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, mask: X.clone(), "gives the same outputs for different inputs"),
        (lambda x, mask: x * torch.nan, "gives NaN or Inf"),
        (
            lambda x, mask: x @ torch.ones(9),
            r"does not run on the adapter's inputs \(float32 1x4, int64 1x3\)",
        ),
        (lambda x, mask: x, None),
        (lambda x, mask: (x > 1e9).any(), None),  # a class that stays the same says nothing
        (lambda x, mask: x[:, :0], None),
        (lambda x, mask: {"same": X, "other": x}, None),
    ],
)
def test_given_outputs_when_tried_then_only_what_cannot_be_right_is_refused(mine, monkeypatch, call, said):
    monkeypatch.setattr("torchperf_ros.engines.aoti.load_package", lambda path, device: call)
    if said:
        with pytest.raises(PackageError, match=said):
            users_package(mine(), None, CPU, example_of(), {})
    else:
        assert users_package(mine(), None, CPU, example_of(), {}).call is call


def test_given_inputs_that_cannot_vary_when_tried_then_equal_outputs_are_no_reason_to_refuse(
    mine, monkeypatch
):
    path, example = mine(), (torch.tensor([4, 4]),)
    edit_identity(path, signature=["int64 2"])
    monkeypatch.setattr("torchperf_ros.engines.aoti.load_package", lambda path, device: lambda i: i.float())
    users_package(path, None, CPU, example, {})
