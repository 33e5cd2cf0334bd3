"""Golden outputs in a file.

What was published, for which frame, and from what; where others differ from them.
"""

import dataclasses

import pytest

from torchperf_ros.api.messages import encode
from torchperf_ros.replay.golden.fixtures import (
    GoldenError,
    compare_frames,
    golden_of,
    read_golden,
    write_golden,
)
from torchperf_ros.replay.golden.message_rule import BUILT_IN, ImageTolerance, MessageRule
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.replay.replay import PublishedFrame

from .made_outputs import IMAGE, array, image, marker, markers, path, pose, result_of, stamp_ns


def test_given_outputs_of_two_stages_when_written_and_read_then_they_are_the_same(tmp_path):
    engines = {"perception": "full aoti, fast eager", "planning": "full onnxruntime"}
    stages = {"perception": [array(1.0), None, array(2.0)], "planning": [path(pose(3.0))]}
    result = result_of(tmp_path, stages, engines=engines)
    written = golden_of(result, result.stages)
    write_golden(written, tmp_path / "new folder" / "golden.mcap")
    read = read_golden(tmp_path / "new folder" / "golden.mcap")
    assert read == written
    assert read.engines == engines
    assert [(frame.seq, frame.stamp_ns) for frame in read.frames["perception"]] == [
        (0, stamp_ns(0)),
        (2, stamp_ns(2)),
    ]
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
    write_golden(
        golden_of(result_of(tmp_path, {"perception": [markers()]}), ["perception"]),
        tmp_path / "golden.mcap",
    )
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


def test_given_frames_without_an_answer_when_written_and_compared_then_they_count(tmp_path):
    stages = {"perception": [array(1.0)], "planning": [array(2.0)]}
    good, file = result_of(tmp_path, stages), tmp_path / "golden.mcap"
    slow = dataclasses.replace(
        good,
        stages={
            **good.stages,
            "planning": dataclasses.replace(good.stage("planning"), received=4, superseded=3),
        },
    )
    write_golden(golden_of(slow, stages), file)
    slow, golden, good = golden_of(slow, stages), read_golden(file), golden_of(good, stages)
    assert golden.superseded == {"planning": 3}
    assert golden.origin == good.origin
    assert slow.more_superseded_than(golden) == good.more_superseded_than(golden) == []
    (line,) = slow.more_superseded_than(good)
    assert line == "planning: 3 frames had no answer, as a newer one came first; in the golden run 0"


def test_given_a_result_that_says_nothing_for_sure_when_made_golden_then_it_is_refused(tmp_path):
    stages = {"perception": [array(1.0)]}
    with pytest.raises(
        GoldenError, match="pace real depend on how fast this machine is: use fast or virtual"
    ):
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
        (
            lambda data: data.replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe"),
            "cannot be read",
        ),  # zstd's first bytes
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
            assert [frame.data for frames in read.frames.values() for frame in frames] in (
                messages,
                [],
            ), place
    assert refused > len(sound) / 3 / 4


# -- what differs


def frames(*messages, first=0):
    return [
        PublishedFrame(seq, stamp_ns(seq), bytes(encode(message, message.__msgtype__)), message.__msgtype__)
        for seq, message in enumerate(messages, first)
    ]


def compare(mine, golden, rules=BUILT_IN):
    return compare_frames("perception", mine, golden, rules)


def test_given_frames_with_other_numbers_when_their_stamps_are_equal_then_they_are_compared():
    mine = [frame._replace(seq=frame.seq + 100) for frame in frames(array(1.0), array(2.0))]
    comparison = compare(mine, frames(array(1.0), array(2.0)))
    assert (comparison.frames, comparison.differing) == (2, ())
    assert len(compare(mine, frames(array(1.0), array(5.0))).differing) == 1


def test_given_stamps_that_repeat_or_are_zero_when_compared_then_the_nth_belongs_to_the_nth():
    mine = [frame._replace(stamp_ns=0) for frame in frames(array(1.0), array(2.0), array(3.0))]
    assert compare(mine, list(mine)).differing == ()
    assert [frame.seq for frame, _ in compare(mine, [mine[0], mine[2]]).differing] == [1, 2]


def test_given_frames_that_only_one_side_has_when_compared_then_each_is_a_difference():
    comparison = compare(frames(array(1.0), array(2.0)), frames(array(2.0), array(3.0), first=1))
    assert comparison.frames == 3
    assert [(frame.seq, first.value) for frame, (first, *_) in comparison.differing] == [
        (0, "published"),
        (2, "none"),
    ]


def test_given_several_differences_when_told_then_the_first_and_the_worst_of_each_field_stand_there():
    golden = frames(*[markers(marker(float(seq)), marker(50.0)) for seq in range(5)])
    mine = frames(
        markers(marker(0.0), marker(50.0)),
        markers(marker(1.25, score=0.5), marker(50.0)),
        markers(marker(2.375), marker(50.0)),
        markers(marker(3.125), marker(50.0)),
        markers(marker(4.0)),
    )
    text = [" ".join(line.split()) for line in compare(mine, golden).text()]
    assert text == [
        "perception: 4 of 5 frames differ",
        "first in frame seq 1, stamp 1760000000.100000000, with 1 more field:",
        "markers[0].pose.position.x is 1.25, golden 1: off by 0.25, allowed 0.002",
        "by field, the worst of each:",
        "field frames is golden off by allowed in frame",
        "markers[].pose.position.x 3 2.375 2 0.375 0.003 seq 2, stamp 1760000000.200000000",
        "markers[].color.a 1 0.5 1 0.5 0.002 seq 1, stamp 1760000000.100000000",
        "markers 1 1 elements 2 elements seq 4, stamp 1760000000.400000000",
    ]


def test_given_images_when_more_of_their_pixels_differ_than_allowed_then_the_worst_pixel_and_both_shares_stand_there():
    rules = {IMAGE: MessageRule(images={"": ImageTolerance(share=0.25, by=2)})}
    golden = frames(image(1, 2, 3, 4), image(1, 2, 3, 4))
    text = [
        " ".join(line.split())
        for line in compare(frames(image(1, 9, 3, 4), image(1, 9, 9, 4)), golden, rules).text()
    ]
    assert text[1:3] + text[5:] == [
        "first in frame seq 1, stamp 1760000000.100000000:",
        "data is (9) at row 0, column 1, golden (2): off by 50 % of 4 pixels, allowed 25 %, or any by 2",
        (
            "data 1 (9) at row 0, column 1 (2) 50 % of 4 pixels 25 %, or any by 2 seq 1, stamp"
            " 1760000000.100000000"
        ),
    ]
