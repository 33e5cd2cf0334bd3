import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.engines.output_sizes import SizeRule

ranges = st.tuples(st.integers(1, 300), st.integers(0, 1000)).map(lambda pair: (pair[0], pair[0] + pair[1]))


class Asked:
    """A size rule that counts the sizes that it was asked for."""

    def __init__(self, rule):
        self.rule, self.sizes = rule, set()

    def __call__(self, size):
        self.sizes.add(size)
        return self.rule(size)


@given(
    span=ranges, stride=st.integers(1, 64), offset=st.integers(-40, 80), multiple=st.integers(1, 5),
    plus=st.integers(0, 9),
)  # fmt: skip
def test_given_any_rule_of_this_form_when_learned_then_it_is_right_for_every_size_and_few_were_asked_for(
    span, stride, offset, multiple, plus
):
    low, high = span
    asked = Asked(lambda size: plus + multiple * ((size + offset) // stride))
    rule = SizeRule.learn(asked, low, high)
    assert rule is not None
    assert [rule(size) for size in range(low, high + 1)] == [asked.rule(size) for size in range(low, high + 1)]
    assert len(asked.sizes) <= 4 * math.log2(2 * stride) + 10


@pytest.mark.parametrize(
    "of",
    [
        lambda size: size * size // 100,
        lambda size: 300 - size,
        lambda size: size if size < 150 else 150,
        lambda size: size % 7,
        lambda size: round(math.sqrt(size) * 10),
        lambda size: hash((size, 1)) % 100,
    ],
    ids=["quadratic", "falling", "capped", "periodic", "root", "random"],
)
def test_given_a_size_that_follows_otherwise_when_learned_then_there_is_no_rule(of):
    assert SizeRule.learn(of, 100, 200) is None
