"""Outputs beside golden ones: frames are matched by stamp, and the report says where they differ first and most."""

from torchperf_ros.config.message_types import encode
from torchperf_ros.replay.golden.golden_file import compare_frames
from torchperf_ros.replay.golden.message_rule import BUILT_IN, ImageTolerance, MessageRule
from torchperf_ros.replay.replay_result import PublishedFrame

from .golden_messages import IMAGE, array, image, marker, markers
from .stage_results import stamp_ns


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
        "markers[] 1 none one at (50, 0, 0) seq 4, stamp 1760000000.400000000",
    ]


def test_given_images_when_more_of_their_pixels_differ_than_allowed_then_the_worst_pixel_and_both_shares_stand_there():
    rules = {IMAGE: MessageRule(images={"": ImageTolerance(share=0.25, by=2)})}
    golden = frames(image(1, 2, 3, 4), image(1, 2, 3, 4))
    text = [
        " ".join(line.split()) for line in compare(frames(image(1, 9, 3, 4), image(1, 9, 9, 4)), golden, rules).text()
    ]
    assert text[1:3] + text[5:] == [
        "first in frame seq 1, stamp 1760000000.100000000:",
        "data is (9) at row 0, column 1, golden (2): off by 50 % of 4 pixels, allowed 25 %, or any by 2",
        "data 1 (9) at row 0, column 1 (2) 50 % of 4 pixels 25 %, or any by 2 seq 1, stamp 1760000000.100000000",
    ]
