"""How surprising a departure is, judged by the departures seen before: the scale that makes detectors comparable."""

import math

from torchperf_ros.core.anomaly.ranked_window import RankedWindow

MOST_SURPRISING = 30.0
"""Surprise is cut off here: a probability of 1e-30 and less means "never"."""

_SIZE = 4096  # samples; two weeks at 5 min, an hour at 1 Hz
_WARM_UP = 48  # samples before anything can surprise: fewer say nothing about a tail
_TAIL_SHARE = 50  # the largest 1/50 are the tail
_SMALLEST_TAIL = 6
_PRIOR_INDEX = 2.0  # a heavy tail (finite mean, infinite variance) until the data say otherwise,
_PRIOR_WEIGHT = 8  # with the weight of so many samples
_FIT_EVERY = 16  # samples; a fit costs about as much as 16 look-ups
_LEARN_UP_TO = 3.0  # a more surprising departure is learnt as if it had been this surprising


class Tail:
    """The distribution of one kind of departure (absolute, any unit), over the last 4096 samples.

    Within what was seen, the probability of a departure as large is its rank. Beyond, it follows a Pareto tail whose
    index is Hill's estimate over the largest 2 % (B. M. Hill, A simple general approach to inference about the tail
    of a distribution, 1975), drawn towards a heavy one while there are few. Peaks over a threshold as in A. Siffer et
    al., Anomaly detection in streams with extreme value theory, 2017, with the threshold moving with the window.

    What is very surprising is learnt as something smaller: an anomaly does not hide the next one, but what goes on
    happening becomes usual after all.
    """

    __slots__ = ("_fit_in", "_from", "_index", "_share", "_window")

    def __init__(self) -> None:
        self._window = RankedWindow(_SIZE)
        self._from = 0.0  # where the tail begins
        self._share = 0.0  # -log10 of the share of samples in it
        self._index = _PRIOR_INDEX
        self._fit_in = 0

    @property
    def begins(self) -> float:
        """The departure from which on the tail is extrapolated: about 2 % of them are larger."""
        return self._from

    def judge(self, departure: float) -> float:
        """Surprise of a departure >= 0, and learn it: -log10 of the probability of one as large, from 0 to 30."""
        surprise = self._surprise(departure)
        if surprise > _LEARN_UP_TO and self._from > 0:
            departure = min(departure, self._from * 10 ** ((_LEARN_UP_TO - self._share) / self._index))
        self._window.add(departure)
        return surprise

    def _surprise(self, departure: float) -> float:
        count = len(self._window)
        if count < _WARM_UP:
            return 0.0
        if self._fit_in == 0:
            self._fit(count)
            self._fit_in = _FIT_EVERY
        self._fit_in -= 1
        if departure <= 0:
            return 0.0
        if self._from <= 0:  # never anything but zero so far
            return MOST_SURPRISING
        if departure <= self._from:
            return math.log10((count + 1) / (self._window.count_from(departure) + 1))
        # a difference of logarithms: the ratio itself may overflow
        beyond = self._index * (math.log10(departure) - math.log10(self._from))
        return min(MOST_SURPRISING, self._share + beyond)

    def _fit(self, count: int) -> None:
        largest = self._window.largest(max(_SMALLEST_TAIL, count // _TAIL_SHARE))
        tail = [value for value in largest if value > 0]
        if not tail:
            self._from = 0.0
            return
        self._from = tail[0]
        self._share = math.log10((count + 1) / (len(tail) + 1))
        base = math.log(tail[0])
        excess = sum(math.log(value) - base for value in tail)
        self._index = (_PRIOR_WEIGHT + len(tail)) / (_PRIOR_WEIGHT / _PRIOR_INDEX + excess)
