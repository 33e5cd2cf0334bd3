"""What belongs to a package: its manifest, whether it fits, and which engine is chosen."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.package_manifest import (
    EngineChoice,
    Identity,
    Manifest,
    PackageError,
    check_package,
    choose_engine,
    file_sha256,
    manifest_path,
    read_manifest,
)

IDENTITY = Identity(
    torch="2.9.0",
    device="cpu",
    capability="AVX2 flags 12",
    options=BuildOptions("aoti").as_dict(),
    signature=["float32 1x3x8x8", "int64 1"],
    dynamic=[[0, 0, 1, 8]],
    weights="a" * 64,
    code="b" * 64,
)
OTHER = {
    "torch": "2.9.1",
    "device": "NVIDIA Orin",
    "capability": "AVX2 flags 13",
    "options": BuildOptions().as_dict(),
    "signature": ["float32 1x3x8x9", "int64 1"],
    "dynamic": [[0, 0, 1, 16]],
    "weights": "c" * 64,
    "code": "d" * 64,
    "threads": 4,
    "format": 9,
}


def manifest_of(package, identity=IDENTITY, **changes):
    values = {
        "adapter": "m:C",
        "tier": "full",
        "package_sha256": file_sha256(package),
        "package_bytes": package.stat().st_size,
        "graph": "e" * 64,
        "parity": {"relative_l2": 0.0},
        "timings": {"float32 1": {"p50_ms": 1.0}},
        "peak_memory_bytes": 1,
        "compile_s": 2,
        "built": "2026-01-01",
    }
    return Manifest(identity, **{**values, **changes})


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "full.pt2"
    path.write_bytes(b"compiled")
    manifest_path(path).write_text(manifest_of(path).to_json(), encoding="utf-8")
    return path


def test_given_a_package_when_checked_then_its_manifest_comes_back_if_both_are_there_and_whole(package):
    assert check_package(package, IDENTITY) == manifest_of(package)
    assert check_package(package, None) == manifest_of(package)
    package.write_bytes(b"comp")
    with pytest.raises(PackageError, match="has 4 bytes; its manifest says 8: it is truncated"):
        check_package(package, IDENTITY)
    manifest_path(package).unlink()
    with pytest.raises(PackageError, match=r"full.pt2 has no manifest full.json; `torchperf compile`"):
        check_package(package, IDENTITY)


@pytest.mark.parametrize("name", OTHER)
def test_given_another_value_of_any_part_when_compared_then_key_and_message_are_others(package, name):
    wanted = replace(IDENTITY, **{name: OTHER[name]})
    assert wanted.key != IDENTITY.key
    with pytest.raises(
        PackageError, match=f"full.pt2 does not fit: .*{'option engine' if name == 'options' else name}"
    ):
        check_package(package, wanted)


def test_given_several_differences_when_compared_then_each_is_said_with_both_values():
    wanted = replace(
        IDENTITY, torch="2.9.1", options={**IDENTITY.options, "precision": "bf16"}, weights="c" * 64
    )
    assert IDENTITY.differences(wanted) == [
        "torch 2.9.0, wanted 2.9.1",
        "option precision 'fp32', wanted 'bf16'",
        "weights aaaaaaaaaaaa..., wanted cccccccccccc...",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "JSONDecodeError"),
        (b"{}", "KeyError: 'identity'"),
        (b'{"identity": {"format": 4}}', "missing"),
        (b"[" * 100_000, "RecursionError"),
        (b'{"identity": {"format": 7, "more": 1}}', "has format 7; this version reads 4"),
    ],
)
def test_given_a_damaged_manifest_when_read_then_it_is_named_with_what_is_wrong(package, content, said):
    manifest_path(package).write_bytes(content)
    with pytest.raises(PackageError, match=said) as raised:
        read_manifest(package)
    assert str(manifest_path(package)) in str(raised.value)
    assert "build the package again" in str(raised.value)


@pytest.mark.parametrize("name", list(asdict(manifest_of(Path(__file__)))))
def test_given_a_value_of_another_type_when_read_then_it_is_refused_by_name(package, name):
    values = {**json.loads(manifest_of(package).to_json()), name: None}
    manifest_path(package).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(PackageError, match=f"TypeError|ProtocolError: Manifest.{name} is 'None'"):
        read_manifest(package)


@pytest.mark.parametrize(("parts", "good"), [("", True), ("body: 80% of eager's time", False)])
def test_given_the_manifest_of_an_earlier_version_when_read_then_it_is_refused_only_if_its_package_is_of_parts(
    package, parts, good
):
    path = manifest_path(package)
    path.write_text(
        json.dumps({**json.loads(manifest_of(package).to_json()), "parts": parts}), encoding="utf-8"
    )
    if good:
        assert read_manifest(package) == manifest_of(package)
        return
    with pytest.raises(PackageError, match="is of parts of a model; leave it out"):
        read_manifest(package)


@given(place=st.integers(0, 7), bit=st.integers(0, 7))
def test_given_any_bit_that_flipped_when_checked_then_the_package_is_corrupt(tmp_path_factory, place, bit):
    package = tmp_path_factory.mktemp("bits") / "full.pt2"
    package.write_bytes(b"compiled")
    manifest_path(package).write_text(manifest_of(package).to_json(), encoding="utf-8")
    damaged = bytearray(b"compiled")
    damaged[place] ^= 1 << bit
    package.write_bytes(damaged)
    with pytest.raises(PackageError, match="is corrupt: its SHA-256 is"):
        check_package(package, IDENTITY)


EAGER = Calibration(10.0, 12.0)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (Calibration(5.0, 6.0), "aoti"),
        (Calibration(9.6, 12.0), "aoti"),
        (Calibration(9.7, 9.7), "eager"),  # 3 %: a tie
        (Calibration(11.0, 11.0), "eager"),
        (Calibration(5.0, 15.0), "aoti"),  # the p99 of two measurements scatters
        (Calibration(5.0, 15.1), "eager"),
        (Calibration(float("nan"), float("nan")), "eager"),
    ],
)
def test_given_an_engine_when_compared_with_eager_then_it_is_chosen_only_if_clearly_better(found, chosen):
    assert choose_engine({"eager": EAGER, "aoti": found}) == chosen


def test_given_several_better_engines_when_chosen_then_the_smallest_median_wins():
    found = {
        "static": Calibration(4.0, 5.0),
        "aoti": Calibration(3.0, 5.0),
        "dynamic": Calibration(2.0, 90.0),
    }
    assert choose_engine({"eager": EAGER, **found}) == "aoti"


times_ms = st.floats(0.001, 1000.0)
calibrations = st.builds(lambda median, tail: Calibration(median, median + tail), times_ms, times_ms)


@given(st.dictionaries(st.text(max_size=3), calibrations), calibrations)
def test_given_any_measurements_when_chosen_then_the_choice_is_never_slower_than_eager(found, eager):
    measured = {**found, "eager": eager}
    chosen = measured[choose_engine(measured)]
    assert chosen.median_ms <= eager.median_ms
    assert chosen.p99_ms <= eager.p99_ms * 1.25


@given(st.dictionaries(st.text(max_size=3), calibrations), calibrations, st.data())
def test_given_a_choice_when_some_engines_cannot_run_then_the_best_of_the_others_is_as_if_chosen_from_them(
    found, eager, data
):
    measured = {**found, "eager": eager}
    timings_ms = {name: [one.median_ms, one.p99_ms] for name, one in measured.items()}
    choice = EngineChoice(choose_engine(measured), timings_ms)
    names = {"eager", *data.draw(st.lists(st.sampled_from(sorted(measured))))}
    expected = choice.engine if choice.engine in names else choose_engine({n: measured[n] for n in names})
    assert choice.best_of(names) == expected
