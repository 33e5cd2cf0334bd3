"""What golden files are called."""

from torchperf_ros.replay.golden.golden_fixture import file_stem


def test_given_names_that_differ_in_odd_characters_only_when_made_a_file_s_then_they_are_still_apart():
    names = ["t.ü", "t.ö", "t._", "t[a/b]", "t[a b]", "t[a_b]", "t_a_b_", "t\ud800"]
    stems = [file_stem(name) for name in names]

    assert len(set(stems)) == len(names)
    assert all(stem.replace("-", "_").replace(".", "_").isidentifier() and stem.isascii() for stem in stems)


def test_given_a_plain_name_when_made_a_file_s_then_it_stays_as_it_is():
    assert file_stem("test_drive.test_night-1.low") == "test_drive.test_night-1.low"
