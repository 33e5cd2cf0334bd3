"""Golden outputs in a file: what was published, for which frame, and from what it was made."""

import dataclasses

import pytest

from torchperf_ros.logs.log_reader import LogReader
from torchperf_ros.replay.golden.golden_file import GoldenError, compare_frames, golden_of, read_golden, write_golden
from torchperf_ros.replay.golden.message_rule import BUILT_IN

from .golden_messages import array, markers, path, pose
from .stage_results import result_of, stamp_ns


def test_given_outputs_of_two_stages_when_written_and_read_then_they_are_the_same(tmp_path):
    result = result_of(tmp_path, {"perception": [array(1.0), None, array(2.0)], "planning": [path(pose(3.0))]})
    written = golden_of(result, result.stages)
    write_golden(written, tmp_path / "new folder" / "golden.mcap")
    read = read_golden(tmp_path / "new folder" / "golden.mcap")
    assert read == written
    assert [(frame.seq, frame.stamp_ns) for frame in read.frames["perception"]] == [(0, stamp_ns(0)), (2, stamp_ns(2))]
    assert read.frames["perception"][1].message.data.tolist() == [2.0]
    assert [file.name for file in (tmp_path / "new folder").iterdir()] == ["golden.mcap"]


def test_given_verdicts_of_the_guard_then_they_are_there_and_another_one_is_a_difference(tmp_path):
    golden = golden_of(result_of(tmp_path, {"planning": [array(1.0), array(2.0)]}), ["planning"])
    first, second = golden.frames["planning"]
    guarded = {"planning": (first._replace(check="accept"), second._replace(check="brake"))}
    write_golden(dataclasses.replace(golden, frames=guarded), tmp_path / "golden.mcap")
    found = read_golden(tmp_path / "golden.mcap")
    assert [frame.check for frame in found.frames["planning"]] == ["accept", "brake"]
    assert found.origin == golden.origin
    compared = compare_frames("planning", golden.frames["planning"], found.frames["planning"], BUILT_IN)
    assert [difference.field for _, differences in compared.differing for difference in differences] == [
        "the guard's verdict"
    ] * 2


def test_given_stamps_before_1970_when_written_and_read_then_they_are_the_same(tmp_path):
    result = result_of(tmp_path, {"perception": [array(1.0), array(2.0), array(3.0)]})
    result.stage("perception").frames["stamp_ns"] = [-(2**31) * 10**9, -1, 5]
    written = golden_of(result, result.stages)
    write_golden(written, tmp_path / "golden.mcap")
    assert read_golden(tmp_path / "golden.mcap") == written


def test_given_a_golden_file_when_opened_as_a_log_then_any_tool_can_read_its_messages(tmp_path):
    write_golden(golden_of(result_of(tmp_path, {"perception": [markers()]}), ["perception"]), tmp_path / "golden.mcap")
    with LogReader(tmp_path / "golden.mcap") as log:
        (message,) = log.messages()
    assert (message.type_name, message.t_ns) == ("visualization_msgs/msg/MarkerArray", stamp_ns(0))


@pytest.mark.parametrize(
    ("summary", "changes"),
    [
        ({}, []),
        ({"log": {"sha256": "another"}}, ["log"]),
        ({"params_sha256": "others", "pace": "virtual", "seed": 1}, ["parameters", "pace", "seed"]),
        ({"model": {"perception": "another", "planning": "a model"}}, ["model of perception"]),
    ],
)
def test_given_a_later_result_when_asked_what_changed_then_it_is_named(tmp_path, summary, changes):
    stages = {"perception": [], "planning": []}
    golden = golden_of(result_of(tmp_path, stages), stages)
    assert golden_of(result_of(tmp_path, stages, **summary), stages).changed_since(golden) == changes


def test_given_a_result_that_says_nothing_for_sure_when_made_golden_then_it_is_refused(tmp_path):
    stages = {"perception": [array(1.0)]}
    with pytest.raises(GoldenError, match="pace real depend on how fast this machine is: use fast or virtual"):
        golden_of(result_of(tmp_path, stages, pace="real"), stages)
    interrupted = dataclasses.replace(result_of(tmp_path, stages), complete=False)
    with pytest.raises(GoldenError, match="interrupted"):
        golden_of(interrupted, stages)
    with pytest.raises(GoldenError, match="not kept: give it an output file"):
        golden_of(dataclasses.replace(interrupted, complete=True, output=None), stages)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "cannot be read"),
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda data: data.replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe"), "cannot be read"),  # zstd's first bytes
        (None, "is an MCAP that holds no golden outputs"),
    ],
    ids=["empty", "cut", "chunk", "another MCAP"],
)
def test_given_a_file_that_is_no_golden_file_when_read_then_one_line_says_so(tmp_path, damage, words):
    result = result_of(tmp_path, {"perception": [array(float(number)) for number in range(20)]})
    file = tmp_path / "golden.mcap"
    write_golden(golden_of(result, result.stages), file)
    file.write_bytes(result.output.read_bytes() if damage is None else damage(file.read_bytes()))
    with pytest.raises(GoldenError, match=rf"golden file .*golden.mcap: {words}") as caught:
        read_golden(file)
    assert "\n" not in str(caught.value)


def test_given_one_wrong_byte_anywhere_when_read_then_no_message_is_another_one(tmp_path):
    result = result_of(tmp_path, {"perception": [array(float(number)) for number in range(5)]})
    file = tmp_path / "golden.mcap"
    golden = golden_of(result, result.stages)
    write_golden(golden, file)
    messages = [frame.data for frame in golden.frames["perception"]]
    sound, refused = file.read_bytes(), 0
    for place in range(0, len(sound), 3):
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 0x10]) + sound[place + 1 :])
        try:
            read = read_golden(file)
        except GoldenError:
            refused += 1
        else:
            assert [frame.data for frames in read.frames.values() for frame in frames] in (messages, []), place
    assert refused > len(sound) / 3 / 4
