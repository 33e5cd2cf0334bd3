"""Engine auto.

What it builds, what it takes, and that it does so once. The engines are made up, and take no time.
"""

import re

import pytest
import torch

from torchperf_ros.engines import package
from torchperf_ros.engines.package import ENGINES
from torchperf_ros.engines.package_engine import Built, PackageEngine
from torchperf_ros.engines.stopwatch import Timing
from torchperf_ros.settings.build_options import AUTO, BuildOptions

from . import conftest
from .conftest import job
from .test_tier_loader import Loaded

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


def test_given_nothing_when_loaded_then_the_tier_runs_in_eager_and_is_missing(engines, adapters, tmp_path):
    loaded = load(adapters, tmp_path / "cache")
    assert (loaded.facts.engine, loaded.facts.why, loaded.missing) == (
        "eager",
        "not compiled yet",
        ["full"],
    )
    assert (loaded.reported, engines["timed"]) == ([], [])


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
        r"no engine can run it: aoti: RuntimeError: it cannot \(test_auto_engine.py:.*; openvino: ",
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
