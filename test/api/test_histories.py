import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import AdapterError, ConfigError
from torchperf_ros.api.histories import (
    HistoryBuffer,
    StampVerdict,
)

MS = 1_000_000
START = 1_700_000_000_000 * MS


def buffer(capacity: int = 3, row_shape: tuple[int, ...] = (2,), **others) -> HistoryBuffer:
    return HistoryBuffer(
        capacity, row_shape, **{"max_gap_ns": 500 * MS, "tolerance_ns": 200 * MS, **others}
    )


@pytest.fixture
def history():
    return buffer()


@pytest.mark.parametrize(
    ("step_ns", "verdict"),
    [
        (1, StampVerdict.NEXT),
        (500 * MS, StampVerdict.NEXT),
        (500 * MS + 1, StampVerdict.GAP),
        (0, StampVerdict.REPEATED),
        (-1, StampVerdict.OLDER),
        (-200 * MS, StampVerdict.OLDER),
        (-200 * MS - 1, StampVerdict.JUMPED_BACK),
        (-START, StampVerdict.UNSTAMPED),
        (-START - 1, StampVerdict.UNSTAMPED),
    ],
)
def test_given_a_last_stamp_when_the_next_comes_then_its_step_decides(history, step_ns, verdict):
    assert history.append(row(1), START) is StampVerdict.FIRST
    assert history.append(row(2), START + step_ns) is verdict
    if verdict is StampVerdict.UNSTAMPED:  # it moves nothing
        assert history.append(row(3), START) is StampVerdict.REPEATED


def test_given_one_stamp_from_the_far_future_when_time_goes_on_then_the_history_recovers_at_once(history):
    stamps = (START, START + 3_600_000 * MS, START + 33 * MS, START + 66 * MS)
    found = [history.append(row(n), stamp_ns) for n, stamp_ns in enumerate(stamps, 1)]
    assert found == [StampVerdict.FIRST, StampVerdict.GAP, StampVerdict.JUMPED_BACK, StampVerdict.NEXT]
    assert firsts(history) == ([0, 3, 4], [False, True, True])


def row(value: float) -> torch.Tensor:
    return torch.tensor([float(value), -float(value)])


def firsts(history: HistoryBuffer) -> tuple[list[float], list[bool]]:
    rows, mask = history.window()
    return rows[:, 0].tolist(), mask.tolist()


@pytest.mark.parametrize(
    "sample", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(()), torch.zeros(2, dtype=torch.float64)]
)
def test_given_a_wrong_sample_when_appended_then_the_error_says_so_and_nothing_changed(history, sample):
    history.append(row(1), START)
    with pytest.raises(AdapterError, match=r"rows of shape \(2,\) and torch.float32, got"):
        history.append(sample, START + MS)
    assert firsts(history) == ([0, 0, 1], [False, False, True])
    assert history.append(row(2), START + MS) is StampVerdict.NEXT


def test_given_a_sample_with_a_graph_when_appended_then_the_row_is_a_detached_copy(history):
    sample = torch.ones(2, requires_grad=True)
    history.append(sample * 2, START)
    with torch.no_grad():
        sample.fill_(7)
    rows, _ = history.window()
    assert not rows.requires_grad
    assert rows[-1].tolist() == [2, 2]


def test_given_inference_mode_when_made_there_then_it_works_outside_too():
    with torch.inference_mode():
        history = buffer()
        history.append(torch.ones(2), START)
        history.window()
    history.append(row(2), START + MS)
    with torch.inference_mode():
        history.append(row(3), START + 2 * MS)
    assert firsts(history) == ([1, 2, 3], [True, True, True])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: buffer(max_gap_ns=0), "max_gap_ns is 0"),
        (lambda: buffer(tolerance_ns=-1), "tolerance_ns is -1"),
        (lambda: buffer(0), "capacity is 0"),
        (lambda: buffer(3, (2, -1)), r"row_shape is \(2, -1\)"),
    ],
)
def test_given_a_bad_bound_or_size_when_made_then_the_error_names_it(make, named):
    with pytest.raises(ConfigError, match=named):
        make()


@given(
    capacity=st.integers(1, 5),
    stamps_ms=st.lists(st.one_of(st.integers(0, 400), st.integers(-5, 10**9)), max_size=40),
)
def test_given_any_stamps_when_appended_then_the_window_is_what_a_list_would_hold_in_fixed_bytes(
    capacity, stamps_ms
):
    history = buffer(capacity, ())
    nbytes = history.nbytes
    kept: list[float] = []
    for index, stamp_ms in enumerate(stamps_ms, start=1):
        verdict = history.append(torch.tensor(float(index)), stamp_ms * MS)
        if verdict in {StampVerdict.GAP, StampVerdict.JUMPED_BACK}:
            kept.clear()
        if verdict not in {StampVerdict.REPEATED, StampVerdict.OLDER}:
            kept.append(float(index))
        kept = kept[-capacity:]
        rows, mask = history.window()
        assert rows.tolist() == [0.0] * (capacity - len(kept)) + kept
        assert mask.tolist() == [False] * (capacity - len(kept)) + [True] * len(kept)
    assert history.nbytes == nbytes == capacity * (4 + 4 + 1 + 1)
    history.clear()
    assert (len(history), history.append(torch.tensor(1.0), 1)) == (0, StampVerdict.FIRST)


@given(capacity=st.integers(1, 5), steps=st.lists(st.one_of(st.none(), st.integers(1, 7)), max_size=30))
def test_given_any_gaps_when_skipped_then_their_rows_are_zero_and_masked_out(capacity, steps):
    history = buffer(capacity, ())
    kept: list[float] = []
    for index, gap in enumerate(steps, start=1):
        if gap is None:
            history.append(torch.tensor(float(index)), 0)
            kept.append(float(index))
        else:
            history.skip(gap)
            kept += [0.0] * gap if kept else []
        rows, mask = history.window()
        last = kept[-capacity:]
        assert rows.tolist() == [0.0] * (capacity - len(last)) + last
        assert mask.tolist() == [value > 0 for value in rows.tolist()]
        assert len(history) == sum(mask.tolist())
