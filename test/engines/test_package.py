"""The layer Package: which of made-up engines auto takes, in no time, and a user's own files."""

import hashlib
import re
import shutil

import pytest
import torch

from torchperf_ros.engines import package
from torchperf_ros.engines.device import Timing
from torchperf_ros.engines.package import ENGINES, users_package
from torchperf_ros.engines.package_engine import Built, PackageEngine
from torchperf_ros.engines.parity import LIMITS, check_engine
from torchperf_ros.settings.build_options import AUTO, BuildOptions
from torchperf_ros.workers.package_manifest import PackageError, manifest_path

from . import conftest
from .conftest import PATIENCE_S, edit_identity, job
from .test_tier_loader import Loaded

pytestmark = pytest.mark.timeout(PATIENCE_S)
CPU = torch.device("cpu")


class Pretended(PackageEngine):
    """Runs what the adapter builds; its file is empty."""

    keeps_nest = True

    def __init__(self, name, adapters, seed=0):
        self.name, self.adapters, self.seed, self.built, self.can = name, adapters, seed, 0, True

    def convert(self, tier, options, path):
        self.built += 1
        if not self.can:
            raise RuntimeError("it cannot\nand that is that")
        path.write_bytes(b"")
        return Built("g" * 64)

    def open(self, path, options, device):
        with torch.inference_mode(mode=False):
            return self.adapters.Compiled({"seed": self.seed}, CPU).build("full").eval()


@pytest.fixture
def engines(monkeypatch, adapters):
    """Two made-up engines, and how long each takes in ms; none of the real ones."""
    for name in list(ENGINES):
        monkeypatch.delitem(ENGINES, name)
    made = {name: Pretended(name, adapters) for name in ("aoti", "openvino")}
    for name, engine in made.items():
        monkeypatch.setitem(ENGINES, name, engine)
    made["ms"], made["timed"] = {"eager": 10.0, "aoti": 6.0, "openvino": 3.0}, []

    def timed(calls, device, **more):
        made["timed"].append((list(calls), more))
        return {name: Timing((made["ms"][name],)) for name in calls}

    monkeypatch.setattr(package, "time_interleaved", timed)
    return made


def build(cache, **changes):
    """What it says of the tier at the end, and whether all is there."""
    said, good = conftest.build(job(cache, build=[BuildOptions(AUTO).as_dict()], **changes))
    return said[-2], good


def load(adapters, cache, **options):
    return Loaded(adapters.Compiled({}, CPU), cache, BuildOptions(AUTO, **options))


def test_given_engines_when_built_then_the_fastest_is_taken_with_the_figures_of_all(
    engines, adapters, tmp_path
):
    said, good = build(tmp_path)
    assert (good, said["kind"], said["new"], said["manifest"]["identity"]["options"]["engine"]) == (
        True,
        "built",
        True,
        "openvino",
    )
    assert said["package"].endswith(".blob")
    ((names, how),) = engines["timed"]
    assert (names, how["inner"], how["pause_s"] > 0.02) == (["eager", "aoti", "openvino"], 1, True)
    loaded = load(adapters, tmp_path)
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing, loaded.reported) == (
        "openvino",
        "",
        [],
        [],
    )
    assert loaded.facts.choice == said["choice"] == "openvino 3, aoti 6, eager 10 ms (p50, paced)"


def test_given_a_choice_when_built_and_loaded_again_then_nothing_is_built_or_timed(
    engines, adapters, tmp_path
):
    build(tmp_path)
    engines["timed"].clear()
    for path in tmp_path.glob("*.pt2"):
        path.unlink()  # the loser's
    said, good = build(tmp_path)
    load(adapters, tmp_path)
    assert (good, said["new"], said["choice"]) == (
        True,
        False,
        "openvino 3, aoti 6, eager 10 ms (p50, paced)",
    )
    assert (engines["timed"], engines["aoti"].built, engines["openvino"].built) == ([], 1, 1)
    build(tmp_path, force=True)
    assert len(engines["timed"]) == 1


def test_given_a_winner_whose_package_is_gone_then_it_is_missing_and_built_again(
    engines, adapters, tmp_path
):
    build(tmp_path)
    for path in tmp_path.glob("*.blob"):
        path.unlink()
    loaded = load(adapters, tmp_path)
    assert (loaded.facts.engine, loaded.missing) == ("eager", ["full"])
    build(tmp_path)
    assert (engines["openvino"].built, engines["aoti"].built) == (2, 1)
    assert load(adapters, tmp_path).facts.engine == "openvino"


@pytest.mark.parametrize("reason", ["cannot", "wrong"])
def test_given_an_engine_that_fails_when_built_then_the_others_are_chosen_from_and_it_is_said_why(
    engines, adapters, tmp_path, reason
):
    engines["openvino"].can, engines["openvino"].seed = reason != "cannot", 1
    said, good = build(tmp_path)
    why = "RuntimeError: it cannot" if reason == "cannot" else "outputs differ from eager's: relative L2"
    assert good
    assert said["choice"].startswith(f"aoti 6, eager 10 ms (p50, paced); left out: openvino: {why}")
    assert load(adapters, tmp_path).facts.engine == "aoti"
    assert not list(tmp_path.glob("*.blob"))


def test_given_no_engine_that_can_when_built_then_it_fails_once_and_no_start_tries_again(
    engines, adapters, tmp_path
):
    engines["openvino"].can = engines["aoti"].can = False
    said, good = build(tmp_path)
    assert (good, said["kind"]) == (False, "failed")
    assert re.match(
        r"no engine can run it: aoti: RuntimeError: it cannot \(test_package.py:.*; openvino: ",
        said["text"],
    )
    loaded = load(adapters, tmp_path)
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing) == ("eager", "", [])
    assert "left out: aoti: RuntimeError: it cannot" in loaded.facts.choice
    assert build(tmp_path)[0]["kind"] == "failed"
    assert engines["aoti"].built == 1


def test_given_eager_as_the_fastest_when_built_then_it_runs_and_nothing_is_missing(
    engines, adapters, tmp_path
):
    engines["ms"]["eager"] = 3.05
    said, good = build(tmp_path)
    assert (good, said["package"], said["manifest"]) == (True, "", None)
    loaded = load(adapters, tmp_path)
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing) == ("eager", "", [])
    assert loaded.facts.choice == "eager 3.05, openvino 3, aoti 6 ms (p50, paced)"


@pytest.mark.parametrize("answers_alike", [True, False])
def test_given_numbers_beyond_fp32s_limits_when_built_then_the_adapters_score_decides_and_the_worker_follows(
    engines, adapters, tmp_path, monkeypatch, answers_alike
):
    def score(adapter, outputs, reference):
        """The share of rows with the same best class."""
        return float((outputs["best"][0] == reference["best"][0]).float().mean())

    def inputs(adapter, tier):
        frames = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        return [(frame, torch.ones(8, 3, dtype=torch.int64)) for frame in frames]

    class Far(torch.nn.Module):
        """Its numbers are 8 % off; its best classes are eager's, or those of the row before."""

        model = adapters.Compiled({}, CPU).build("full").eval()

        def forward(self, x, mask):
            outputs = self.model(x, mask)
            best = outputs["best"][0] if answers_alike else outputs["best"][0].roll(1)
            return outputs | {"scores": 1.08 * outputs["scores"], "best": (best, x)}

    monkeypatch.setattr(adapters.Compiled, "score", score)
    monkeypatch.setattr(adapters.Compiled, "score_inputs", inputs)
    engines["openvino"].open = lambda *_: Far()
    said, good = conftest.build(job(tmp_path, build=[BuildOptions("openvino").as_dict()]))
    if answers_alike:
        parity = said[-2]["manifest"]["parity"]
        assert (good, parity["score"]) == (True, 1.0)
        assert parity["relative_l2"] > LIMITS["fp32"].relative_l2
        loaded = Loaded(adapters.Compiled({}, CPU), tmp_path, BuildOptions("openvino"))
        assert (loaded.facts.engine, loaded.facts.why) == ("openvino", "")
    else:
        assert not good
        assert re.search(r"allowed for fp32: .*; the answers' score is 0\.\d+, at least", said[-2]["text"])
        assert not list(tmp_path.glob("*.blob"))


@pytest.mark.parametrize("damage", ["{", '{"engine": "x", "timings_ms": {"eager": [1, 2]}}'])
def test_given_a_damaged_choice_when_loaded_then_it_is_made_anew(engines, adapters, tmp_path, damage):
    build(tmp_path)
    (path,) = tmp_path.glob("*.choice")
    path.write_text(damage, encoding="utf-8")
    assert load(adapters, tmp_path).missing == ["full"]
    build(tmp_path)
    assert load(adapters, tmp_path).facts.engine == "openvino"


def test_given_a_folder_then_the_winner_is_said_and_there_under_the_tiers_name(engines, tmp_path):
    folders = {"cache": tmp_path / "cache", "out": str(tmp_path / "out")}
    assert build(**folders, dry_run=True)[0]["text"] == "would be chosen out of aoti, openvino and eager"
    assert build(**folders)[0]["package"] == str(tmp_path / "out" / "full.blob")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["full.blob", "full.json"]
    assert build(**folders, dry_run=True)[0]["text"].endswith(
        ".blob: openvino 3, aoti 6, eager 10 ms (p50, paced)"
    )


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
    assert users_package(path, None, CPU, example_of(), DIMS).static


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
    monkeypatch.setattr("torchperf_ros.engines.file_engines.load_package", lambda path, device: call)
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
    monkeypatch.setattr(
        "torchperf_ros.engines.file_engines.load_package", lambda path, device: lambda i: i.float()
    )
    users_package(path, None, CPU, example, {})
