import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.errors import AdapterError, ConfigError
from torchperf_ros.core.history import GapRule, StampVerdict
from torchperf_ros.worker.history_buffer import HistoryBuffer

MS = 1_000_000
START = 1_700_000_000_000 * MS


def buffer(capacity: int = 3, row_shape: tuple[int, ...] = (2,), **others) -> HistoryBuffer:
    return HistoryBuffer(capacity, row_shape, rule=GapRule(max_gap_ns=100 * MS, tolerance_ns=50 * MS), **others)


def row(value: float) -> torch.Tensor:
    return torch.tensor([float(value), -float(value)])


def firsts(history: HistoryBuffer) -> tuple[list[float], list[bool]]:
    rows, mask = history.window()
    return rows[:, 0].tolist(), mask.tolist()


def test_given_too_few_samples_when_read_then_the_newest_is_last_and_the_rest_is_zero_and_masked():
    history = buffer()
    assert firsts(history) == ([0, 0, 0], [False, False, False])
    history.append(row(1), START)
    history.append(row(2), START + 10 * MS)
    assert firsts(history) == ([0, 1, 2], [False, True, True])
    assert len(history) == 2


def test_given_more_samples_than_rows_when_read_then_the_last_ones_are_there_oldest_first():
    history = buffer()
    for index in range(1, 6):
        history.append(row(index), START + index * MS)
    assert firsts(history) == ([3, 4, 5], [True, True, True])


def test_given_a_repeat_when_appended_then_it_is_ignored_and_counted():
    history = buffer()
    history.append(row(1), START)
    assert history.append(row(2), START) is StampVerdict.REPEATED
    assert history.append(row(3), START - MS) is StampVerdict.OLDER
    assert firsts(history) == ([0, 0, 1], [False, False, True])
    assert history.rule.counts[StampVerdict.REPEATED] == 1


@pytest.mark.parametrize(("step_ns", "verdict"), [(101 * MS, StampVerdict.GAP), (-51 * MS, StampVerdict.JUMPED_BACK)])
def test_given_a_full_history_when_time_jumps_then_only_the_new_sample_is_left(step_ns, verdict):
    history = buffer()
    for index in range(4):
        history.append(row(index), START + index)
    assert history.append(row(9), START + 3 + step_ns) is verdict
    assert firsts(history) == ([0, 0, 9], [False, False, True])


def test_given_a_history_when_cleared_then_it_is_empty_and_takes_any_stamp():
    history = buffer()
    history.append(row(1), START)
    history.clear()
    assert firsts(history) == ([0, 0, 0], [False, False, False])
    assert history.append(row(2), START) is StampVerdict.FIRST


@pytest.mark.parametrize(
    "sample", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(()), torch.zeros(2, dtype=torch.float64)]
)
def test_given_a_wrong_sample_when_appended_then_the_error_says_so_and_nothing_changed(sample):
    history = buffer()
    history.append(row(1), START)
    with pytest.raises(AdapterError, match=r"rows of shape \(2,\) and torch.float32, got"):
        history.append(sample, START + MS)
    assert firsts(history) == ([0, 0, 1], [False, False, True])
    assert history.append(row(2), START + MS) is StampVerdict.NEXT


def test_given_a_sample_with_a_graph_when_appended_then_the_row_is_a_detached_copy():
    history = buffer()
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


def test_given_nan_when_appended_then_it_is_kept_for_the_caller_to_judge():
    history = buffer()
    history.append(row(float("nan")), START)
    assert history.window()[0][-1].isnan().all()


def test_given_a_window_when_read_again_then_the_same_memory_is_used():
    history = buffer()
    rows, mask = history.window()
    history.append(row(1), START)
    again, mask_again = history.window()
    assert (rows.data_ptr(), mask.data_ptr()) == (again.data_ptr(), mask_again.data_ptr())


@pytest.mark.parametrize(("capacity", "row_shape"), [(0, (2,)), (-1, (2,)), (3, (0,)), (3, (2, -1))])
def test_given_a_bad_size_when_made_then_the_error_names_it(capacity, row_shape):
    with pytest.raises(ConfigError, match="capacity|row_shape"):
        buffer(capacity, row_shape)


@given(
    capacity=st.integers(1, 5),
    stamps_ms=st.lists(st.one_of(st.integers(0, 400), st.integers(-5, 10**9)), max_size=40),
)
def test_given_any_stamps_when_appended_then_the_window_is_what_a_list_would_hold_in_fixed_bytes(capacity, stamps_ms):
    history = buffer(capacity, ())
    nbytes = history.nbytes
    kept: list[float] = []
    for index, stamp_ms in enumerate(stamps_ms, start=1):
        verdict = history.append(torch.tensor(float(index)), stamp_ms * MS)
        if verdict.resets:
            kept.clear()
        if not verdict.ignores:
            kept.append(float(index))
        kept = kept[-capacity:]
        rows, mask = history.window()
        assert rows.tolist() == [0.0] * (capacity - len(kept)) + kept
        assert mask.tolist() == [False] * (capacity - len(kept)) + [True] * len(kept)
    assert history.nbytes == nbytes == capacity * (4 + 4 + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_samples_on_the_gpu_when_read_then_the_copies_have_arrived():
    history = buffer(4, (1_000_000,), source=torch.device("cuda"))
    for index in range(6):
        history.append(torch.full((1_000_000,), float(index), device="cuda"), START + index * MS)
    rows, mask = history.window()
    assert rows.is_pinned()
    assert mask.all()
    assert rows.mean(dim=1).tolist() == [2, 3, 4, 5]
