"""Objects over time, of a source that sends no velocities.

Which detection is which object, and how fast each moves.

Each object has three Kalman filters: of constant velocity one for steady motion and one for braking, swerving and
pulling out, and one with an acceleration, as in a bend, where a constant velocity would lag behind. They are mixed
by how well each foresees what is seen: an interacting multiple model (Blom and Bar-Shalom 1988; Bar-Shalom, Li and
Kirubarajan 2001, 11.6.6). How noisy a source's places are is
learned from how far off the filters are. A detection belongs to the object that it fits best, and each to
one (greedy, the best pair first).
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.markers import Floats, Key

Complex = NDArray[np.complex128]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.intp]

# objects; of more, those that move have tracks, and of the others the nearest to the vehicle
_MOST: Final = 256
FAR_M: Final = 500.0  # both at 70 m/s, what is further off is not met within 3 s
# from one array to the next; after a longer time, or so long back, all tracks begin anew
_LONGEST_NS: Final = NS_PER_S
_COAST_S: Final = 0.3  # for which an object that is not detected has its track, and counts if it is sure
# detections: from then on an object has a velocity, and counts if it is not detected
_SURE_AFTER: Final = 3
# Kinds of motion: steady; braking, swerving and pulling out; and with an acceleration, as in a bend.
_KINDS: Final = 3
_LIVELY: Final = 1
_TURNS: Final = 2
_NOISES: Final = np.array([0.01, 4.0, 0.05])  # m^2/s^3, of the velocity: 0.1, 2 and 0.2 m/s in a second
_JERKS: Final = np.array([0.0, 0.0, 0.5])  # m^2/s^5, of the acceleration that the last kind has
_MOST_ACCEL: Final = 1.5  # m/s^2, standard deviation of an acceleration of which nothing is known
_STAYS_S: Final = 2.0  # for which an object keeps to one kind of motion
_FASTEST: Final = 15.0  # m/s, standard deviation of the velocity of what is seen for the first time
_MOST_SPEED: Final = 70.0  # m/s; what seems faster is not one object
_GATE: Final = 3.5  # standard deviations: so far from where it is expected an object may be
_LEAST_GATE: Final = 0.3**2  # m^2; nearer than 1.5 m there is no other object
_SAME_KEY: Final = 4.0  # of a pair's cost: an id that stays counts as much as two standard deviations
# standard deviations, by which the filters may have an object elsewhere than it was detected
_MOST_SHIFT: Final = 2.0
# m, and standard deviations of noise: boxes whose sides differ by less are as large.
_AS_LARGE: Final = (0.05, 2.0)
_MOST_AREA: Final = (
    1.3  # of an object's area its parts have together, or more objects' of a box around them
)
_MOST_EMPTY: Final = 8.0  # so many times the area of known objects a box of them has at most
_PART_AREA: Final = 0.85  # of an object's area; a box that has more is no part of it
_GROWS_M: Final = (
    0.1  # from one detection to the next, by which half of what is certainly an object grows at most
)
_NOISE_M: Final = (0.02, 0.1, 0.5)  # least, first and largest standard deviation of a detection's place
# The first guess of the noise counts as so many detections: with eight objects the noise is known after a second.
_GUESSED: Final = 10
_LEARNS: Final = 0.05  # of the noise in each array, once more detections than that have taught it


class Tracks(NamedTuple):
    """The objects of a source; shapes [n], and of each kind of motion [kinds, n].

    Attributes:
        stamp_ns: by the source's clock.
        noise: variance of a detection's place in m^2, along each axis.
        taught: how many detections have taught that.
        keys: `ns` and `id` of the last detection.
        seen_ns: when each was detected last.
        times: how often it was.
        yaws, halves: as it was detected last; halves [n, 2].
        solid: halves as it has had them for several detections, [n, 2].
        chance: of each kind of motion.
        states: place, velocity and acceleration of each kind, as x + iy; shape [3, kinds, n].
        covariances: of these, the same along each axis; shape [3, 3, kinds, n].
    """

    stamp_ns: int
    noise: float
    taught: int
    keys: tuple[Key, ...]
    seen_ns: NDArray[np.int64]
    times: Numbers
    yaws: Floats
    halves: Floats
    solid: Floats
    chance: Floats
    states: Complex
    covariances: Floats

    @classmethod
    def none(cls, stamp_ns: int, noise: float = _NOISE_M[1] ** 2, taught: int = _GUESSED) -> "Tracks":
        seen_ns, count = np.zeros(0, np.int64), np.zeros(0, np.intp)
        states, covariances = np.zeros((3, _KINDS, 0), np.complex128), np.zeros((3, 3, _KINDS, 0))
        objects = (seen_ns, count, np.zeros(0), np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((_KINDS, 0)))
        return cls(stamp_ns, noise, taught, (), *objects, states, covariances)

    def mean(self) -> tuple[Complex, Complex, Floats]:
        """Place, velocity and the standard deviation of that along each axis, of all kinds together."""
        place, velocity = (self.chance * self.states[:2]).sum(axis=1)
        spread = self.covariances[1, 1] + 0.5 * _squares(self.states[1] - velocity)
        return place, velocity, np.sqrt((self.chance * spread).sum(axis=0))

    def only(self, kept: Numbers) -> "Tracks":
        if not len(kept):
            return Tracks.none(self.stamp_ns, self.noise, self.taught)
        return self._replace(
            keys=tuple(self.keys[at] for at in kept.tolist()),
            seen_ns=self.seen_ns[kept],
            times=self.times[kept],
            yaws=self.yaws[kept],
            halves=self.halves[kept],
            solid=self.solid[kept],
            chance=self.chance[:, kept],
            states=self.states.take(kept, axis=-1),
            covariances=self.covariances.take(kept, axis=-1),
        )

    def moved(self, stamp_ns: int) -> "Tracks":
        dt = (stamp_ns - self.stamp_ns) / NS_PER_S
        changes = (1.0 - math.exp(-dt / _STAYS_S)) / _KINDS
        to = np.full((_KINDS, _KINDS), changes) + (1.0 - _KINDS * changes) * np.eye(_KINDS)
        shares = to[:, :, None] * self.chance
        chance = shares.sum(axis=1)  # to the first axis' kind, from the second's
        shares /= chance[:, None]
        # Relative to one kind's: of places far from the origin the squares would have no digits left.
        first = self.states[:, :1]
        off = self.states - first
        spread = self.covariances + _spread(off)
        off = np.einsum("jin,ain->ajn", shares, off)
        states = first + off
        covariances = np.einsum("jin,abin->abjn", shares, spread) - _spread(off)
        # Only one kind has an acceleration; of the others' nothing is known.
        states[2, :_TURNS] = covariances[2, :, :_TURNS] = covariances[:, 2, :_TURNS] = 0.0
        covariances[2, 2, :_TURNS] = _MOST_ACCEL**2
        for parts in (states, covariances, covariances.swapaxes(0, 1)):
            parts[0] += dt * parts[1]
            parts[0, ..., _TURNS, :] += 0.5 * dt * dt * parts[2, ..., _TURNS, :]
            parts[1, ..., _TURNS, :] += dt * parts[2, ..., _TURNS, :]
        covariances += _noise(dt)
        return self._replace(stamp_ns=stamp_ns, chance=chance, states=states, covariances=covariances)


def _spread(off: Complex) -> Floats:
    """Covariance along each axis of what is so far off, [3, kinds, n]."""
    real, imag = off.real, off.imag
    found: Floats = 0.5 * (real[:, None] * real + imag[:, None] * imag)
    return found


def _noise(dt: float) -> Floats:
    """What each kind of motion adds to the covariances, shape [3, 3, kinds, 1]."""
    of_velocity = np.array([[dt**3 / 3.0, dt**2 / 2.0, 0.0], [dt**2 / 2.0, dt, 0.0], [0.0, 0.0, 0.0]])
    of_acceleration = np.array(
        [
            [dt**5 / 20.0, dt**4 / 8.0, dt**3 / 6.0],
            [dt**4 / 8.0, dt**3 / 3.0, dt**2 / 2.0],
            [dt**3 / 6.0, dt**2 / 2.0, dt],
        ]
    )
    noise: Floats = np.multiply.outer(of_velocity, _NOISES) + np.multiply.outer(of_acceleration, _JERKS)
    return noise[..., None]


def _squares(values: Complex) -> Floats:
    return values.real * values.real + values.imag * values.imag


class Tracked(NamedTuple):
    """What an array's detections are, and what was not detected.

    Attributes:
        tracks: for the next array.
        places: of each detection, where it is, as x + iy.
        velocities: of each, 0 where it is not known.
        unsure: of each, the standard deviation of that in m/s along each axis; 15 where it is not known.
        unknown: of how many it is not known.
        times: of each, how often its object was seen; 0: it is several known objects in one box, which count where
            they are expected. Where an array is the first, or teaches nothing, or has more than can have tracks,
            each counts as seen twice.
        coasting: what counts as well: tracks that were not detected, and of each detection without a
            velocity that may be part of an object that moves, the same box at that velocity.
        left_out: how many objects within 500 m are more than can have tracks.
    """

    tracks: Tracks
    places: Complex
    velocities: Complex
    unsure: Floats
    unknown: int
    times: Numbers
    coasting: Tracks
    left_out: int


def follow(
    before: Tracks | None,
    stamp_ns: int,
    here: complex,
    places: Complex,
    yaws: Floats,
    halves: Floats,
    keys: list[Key],
    late_s: Floats,
) -> Tracked:
    """Take the detections of an array, in a frame that does not move.

    An array that is not newer than the one before teaches nothing; its objects have the velocities that are
    known.

    Args:
        before: the tracks after the array before, None for none.
        stamp_ns: of the array, by the source's clock.
        here: where the vehicle is, as x + iy in m.
        places: of the detections, as x + iy in m.
        yaws: their headings in rad.
        halves: half of their lengths and widths in m, shape [n, 2].
        keys: their `ns` and `id`.
        late_s: how long before the array's stamp each was seen.
    """
    expected, teaches = _expected(before, stamp_ns)
    if not teaches:
        late_s = late_s + (expected.stamp_ns - stamp_ns) / NS_PER_S
    boxes = Boxes(places, yaws, halves, keys, late_s)
    whole, of, near = _wholes(expected, boxes, _near(expected, boxes))
    number, found, beside = _pairs(expected, whole, near)
    there = expected.only(number)
    if teaches:
        there = _corrected(there, whole.places[found], whole.late_s[found])
        there = there._replace(
            keys=tuple(whole.keys[at] for at in found.tolist()),
            yaws=whole.yaws[found],
            halves=whole.halves[found],
            solid=np.minimum(whole.halves[found], there.solid + _GROWS_M),
            times=there.times + 1,
            seen_ns=np.full(len(found), stamp_ns, np.int64),
        )
    missed = expected.stamp_ns - expected.seen_ns <= _COAST_S * NS_PER_S
    missed[number] = False
    waiting, tracks = expected.only(missed.nonzero()[0]), expected
    coasting = waiting.only((waiting.times >= _SURE_AFTER).nonzero()[0])
    if teaches:
        is_new = np.ones(len(whole.places), np.bool_)
        is_new[found] = False
        new = is_new.nonzero()[0]
        begun = [_begun(there, whole.only(new))] if len(new) else []
        tracks = _joined(there, *begun, waiting)._replace(noise=there.noise, taught=there.taught)
    waits = teaches and before is not None and abs(stamp_ns - before.stamp_ns) <= _LONGEST_NS
    if len(tracks.keys) > _MOST:
        tracks, waits = tracks.only(_first(tracks, here)), False
    left_out = _left_out(places, coasting, here)
    count = len(whole.places) + 1  # the last is what counts as others do
    velocities, unsure, shifts = (
        np.zeros(count, np.complex128),
        np.full(count, _FASTEST),
        np.zeros(count, np.complex128),
    )
    place, velocity, spread = there.mean()
    sure = (there.times >= _SURE_AFTER) & (np.abs(velocity) <= _MOST_SPEED)
    which = found[sure]
    velocities[which], unsure[which] = velocity[sure], spread[sure]
    # Where the filters have it, but never further from where it was seen than noise explains.
    shift = place[sure] - velocity[sure] * whole.late_s[which] - whole.places[which]
    shifts[which] = shift / np.maximum(np.abs(shift) / (_MOST_SHIFT * math.sqrt(there.noise)), 1.0)
    beside[which] = -1
    loose = (beside >= 0).nonzero()[0]
    if len(loose):
        also, part = expected.only(beside[loose]), whole.only(loose)
        also.states[0] = part.places + also.mean()[1] * part.late_s
        coasting = _joined(coasting, also._replace(yaws=part.yaws, halves=part.halves))
    times = np.full(count, 1)
    times[_seen_before(expected, whole, near, number, found)] = 2
    times[found] = there.times
    if not waits:
        times = np.maximum(times, 2)
    times[-1] = 0
    unknown = int(np.count_nonzero((unsure[of] == _FASTEST) & (of >= 0)))
    return Tracked(
        tracks, places + shifts[of], velocities[of], unsure[of], unknown, times[of], coasting, left_out
    )


class Boxes(NamedTuple):
    places: Complex
    yaws: Floats
    halves: Floats
    keys: list[Key]
    late_s: Floats

    def only(self, kept: Numbers) -> "Boxes":
        keys = [self.keys[at] for at in kept.tolist()]
        return Boxes(self.places[kept], self.yaws[kept], self.halves[kept], keys, self.late_s[kept])


class _Near(NamedTuple):
    """Pairs of a track and a box that may have to do with each other.

    Attributes:
        tracks, boxes: their numbers.
        off: how far the box is from where the track is expected, as x + iy.
        variance: of each track's expected place and a detection's.
        around: how far in m from where each is expected its box may reach.
        moves: whether each track surely moves.
    """

    tracks: Numbers
    boxes: Numbers
    off: Complex
    variance: Floats
    around: Floats
    moves: Flags

    def only(self, tracks: Flags) -> "_Near":
        kept = tracks[self.tracks]
        return self._replace(tracks=self.tracks[kept], boxes=self.boxes[kept], off=self.off[kept])


def _near(expected: Tracks, boxes: Boxes) -> _Near:
    """All pairs within a track's gate, or whose boxes may touch."""
    place, velocity, unsure = expected.mean()
    own = expected.covariances[0, 0]
    spread = (expected.chance * (own + 0.5 * _squares(expected.states[0] - place))).sum(axis=0)
    # At least that of the lively kind.
    variance = np.maximum(spread, own[_LIVELY]) + max(expected.noise, _LEAST_GATE)
    largest = np.hypot(*boxes.halves.T).max(initial=0.0)
    # Its velocity may be wrong, where another box was taken for it.
    moved = np.abs(velocity) * (expected.stamp_ns - expected.seen_ns) / NS_PER_S
    around = np.hypot(*expected.halves.T) + moved
    reach = np.maximum(math.sqrt(2.0) * _GATE * np.sqrt(variance), around + largest)
    late = np.abs(velocity.real) * np.abs(boxes.late_s).max(initial=0.0)
    # Of boxes in order along x those in a track's reach are a run.
    order = np.argsort(boxes.places.real, kind="stable")
    along = boxes.places.real[order]
    start = np.searchsorted(along, place.real - reach - late)
    count = np.searchsorted(along, place.real + reach + late, "right") - start
    tracks = np.repeat(np.arange(len(count)), count)
    found = order[np.arange(len(tracks)) + np.repeat(start - np.cumsum(count) + count, count)]
    off = boxes.places[found] + velocity[tracks] * boxes.late_s[found] - place[tracks]
    is_near = (np.abs(off.imag) <= reach[tracks]).nonzero()[0]
    moves = _moves(expected, velocity, unsure)
    return _Near(tracks[is_near], found[is_near], off[is_near], variance, around, moves)


def _wholes(expected: Tracks, boxes: Boxes, near: _Near) -> tuple[Boxes, Numbers, _Near]:
    """The detections, each of one object, and which of them every box belongs to.

    Boxes that are together as large as an object that is known, and where it is expected, are parts of it: a detector
    has split it. One that is as large as several together, none of which has a box of its own, is these: -1.
    Then none of these is another box, however near.
    """
    of, count = np.arange(len(boxes.places)), len(expected.keys)
    sure = (expected.times >= _SURE_AFTER) & (expected.stamp_ns - expected.seen_ns <= _COAST_S * NS_PER_S)
    apart, areas, solid = _squares(near.off), boxes.halves.prod(axis=1), expected.solid.prod(axis=1)
    known = sure[near.tracks]
    within = known & (apart <= np.square(expected.solid).sum(axis=1)[near.tracks])
    tracks, found = near.tracks[within], near.boxes[within]
    is_whole, has_own = np.zeros((2, count), np.bool_)
    is_whole[tracks[areas[found] > _PART_AREA * solid[tracks]]] = True
    has_own[tracks[areas[found] <= _MOST_AREA * solid[tracks]]] = True
    # What is as large as a known object where it is expected is no part of another.
    other = np.ones(len(of), np.bool_)
    other[found[np.abs(np.log(areas[found] / solid[tracks])) <= math.log(_MOST_AREA)]] = False
    within &= other[near.boxes]
    tracks, found = near.tracks[within], near.boxes[within]
    together = np.bincount(tracks, areas[found], count)
    parts = (np.bincount(tracks, minlength=count) > 1) & ~is_whole
    parts &= (together <= _MOST_AREA * solid) & (together >= solid / _MOST_AREA)
    holds = known & (apart <= np.square(boxes.halves).sum(axis=1)[near.boxes]) & ~has_own[near.tracks]
    held, around = near.tracks[holds], near.boxes[holds]
    several = np.bincount(around, minlength=len(of)) > 1
    together = np.bincount(around, solid[held], len(of))
    several &= (_MOST_AREA * areas >= together) & (areas <= _MOST_EMPTY * together)
    if not parts.any() and not several.any():
        return boxes, of, near
    off = near.off[within]
    as_large_m = _AS_LARGE[0] + _AS_LARGE[1] * math.sqrt(expected.noise)
    places, yaws, halves = boxes.places.copy(), boxes.yaws.copy(), boxes.halves.copy()
    kept, free = np.ones((2, len(of)), np.bool_)
    for track in parts.nonzero()[0].tolist():
        at = ((tracks == track) & free[found]).nonzero()[0]
        at = at[np.argsort(found[at])]
        some = found[at]
        if len(some) <= 1:  # the others are parts of another object
            continue
        middle, size = _around(off[at], boxes.yaws[some], boxes.halves[some], float(expected.yaws[track]))
        if np.abs(size - expected.solid[track]).max() <= as_large_m:
            places[some[0]] += middle - off[at[0]]
            yaws[some[0]], halves[some[0]] = expected.yaws[track], expected.halves[track]
            of[some], kept[some[1:]], free[some] = some[0], False, False
    is_free = np.ones(count, np.bool_)
    for one in (several & free).nonzero()[0].tolist():
        some, off = held[around == one], -near.off[holds][around == one]
        middle, size = _around(off, expected.yaws[some], expected.solid[some], float(boxes.yaws[one]))
        if np.abs(size - boxes.halves[one]).max() <= as_large_m and abs(middle) <= as_large_m:
            of[one], kept[one], is_free[some] = -1, False, False
    of = np.where(of >= 0, (np.cumsum(kept) - 1)[of], -1)
    whole = Boxes(places, yaws, halves, boxes.keys, boxes.late_s).only(kept.nonzero()[0])
    return whole, of, _near(expected, whole).only(is_free)


def _around(places: Complex, yaws: Floats, halves: Floats, yaw: float) -> tuple[complex, Floats]:
    """Middle and halves of a box of this heading around others."""
    way = np.exp(1j * yaw)
    turned = np.exp(1j * yaws) / way
    cosine, sine = np.abs(turned.real), np.abs(turned.imag)
    reach = np.stack(
        (cosine * halves[:, 0] + sine * halves[:, 1], sine * halves[:, 0] + cosine * halves[:, 1])
    )
    at = np.stack(((places / way).real, (places / way).imag))
    least, most = (at - reach).min(axis=1), (at + reach).max(axis=1)
    return complex(*(0.5 * (least + most))) * way, 0.5 * (most - least)


def _expected(before: Tracks | None, stamp_ns: int) -> tuple[Tracks, bool]:
    if before is None:
        return Tracks.none(stamp_ns), True
    since_ns = stamp_ns - before.stamp_ns
    if abs(since_ns) > _LONGEST_NS:
        return Tracks.none(stamp_ns, before.noise, before.taught), True
    if since_ns <= 0:
        return before, False
    return before.moved(stamp_ns) if len(before.keys) else before._replace(stamp_ns=stamp_ns), True


def _moves(tracks: Tracks, velocity: Complex, unsure: Floats) -> Flags:
    speed = np.abs(velocity)
    return (tracks.times >= _SURE_AFTER) & (speed > unsure) & (speed <= _MOST_SPEED)


def _left_out(places: Complex, coasting: Tracks, here: complex) -> int:
    if len(places) + len(coasting.keys) <= _MOST:
        return 0
    away = np.abs(np.concatenate((places, coasting.mean()[0])) - here)
    return max(int(np.count_nonzero(away <= FAR_M)) - _MOST, 0)


def _first(tracks: Tracks, here: complex) -> Numbers:
    """Which to keep.

    What counts before what was seen too seldom and is missed, then what moves, then the nearest.
    """
    place, velocity, unsure = tracks.mean()
    away = np.abs(place - here)
    seldom = (tracks.seen_ns < tracks.stamp_ns) & (tracks.times < _SURE_AFTER)
    order = np.lexsort((away, ~_moves(tracks, velocity, unsure), seldom, away > FAR_M))
    return np.sort(order[:_MOST])


def _pairs(expected: Tracks, boxes: Boxes, near: _Near) -> tuple[Numbers, Numbers, Numbers]:
    """Which track and which detection belong together.

    And which moving track fits each detection best, -1 for none.
    """
    keys, beside = boxes.keys, np.full(len(boxes.places), -1)
    off = _squares(near.off) / near.variance[near.tracks]
    fits = off <= 2.0 * _GATE * _GATE  # of two axes
    tracks, found = near.tracks[fits], near.boxes[fits]
    cost = off[fits] + 2.0 * np.log(near.variance)[tracks]
    same = [
        expected.keys[track] == keys[one]
        for track, one in zip(tracks.tolist(), found.tolist(), strict=True)
    ]
    cost -= _SAME_KEY * np.array(same, np.float64)
    order = np.argsort(cost, kind="stable")
    taken, given = set[int](), dict[int, int]()
    for track, one in zip(tracks[order].tolist(), found[order].tolist(), strict=True):
        if track not in given and one not in taken:
            taken.add(one)
            given[track] = one
    of_moving = order[::-1][near.moves[tracks[order[::-1]]]]
    beside[found[of_moving]] = tracks[of_moving]  # of several for one detection the last is kept: the best
    return np.array(list(given), np.intp), np.array(list(given.values()), np.intp), beside


def _seen_before(expected: Tracks, boxes: Boxes, near: _Near, number: Numbers, found: Numbers) -> Numbers:
    """Which boxes are where an object was that now has none, or a smaller one: it may be in them."""
    if len(found) == len(boxes.places):
        return found[:0]
    areas = boxes.halves.prod(axis=1)
    lost = np.ones(len(expected.keys), np.bool_)
    lost[number] = _MOST_AREA * areas[found] < expected.halves[number].prod(axis=1)
    near = near.only(lost)
    reach = near.around[near.tracks] + np.hypot(*boxes.halves.T)[near.boxes]
    is_near = (np.abs(near.off) <= reach) | (
        _squares(near.off) <= 2.0 * _GATE * _GATE * near.variance[near.tracks]
    )
    seen: Numbers = near.boxes[is_near]
    return seen


def _corrected(expected: Tracks, places: Complex, late_s: Floats) -> Tracks:
    """Tracks once they were detected there (Kalman 1960), with the noise that this teaches.

    By how much more or less than a filter foresees its squares are off, so much larger or smaller the noise is. All
    filters teach it, each by how likely its kind of motion is.
    """
    if not len(places):
        return expected
    noise, taught = expected.noise, expected.taught
    off = places + expected.states[1] * late_s - expected.states[0]
    squares = 0.5 * _squares(off)
    variance = expected.covariances[0, 0] + noise
    gain = expected.covariances[:, 0] / variance
    fits = np.exp(np.maximum(-squares / variance, -30.0)) / variance * expected.chance
    chance = fits / fits.sum(axis=0)
    sure = expected.times >= _SURE_AFTER
    if count := int(np.count_nonzero(sure)):
        each = noise * (chance * np.minimum(squares / variance, 9.0)).sum(axis=0)
        taught += count
        learned = noise + max(count / taught, _LEARNS) * (float(each[sure].mean()) - noise)
        noise = min(max(learned, _NOISE_M[0] ** 2), _NOISE_M[2] ** 2)
    return expected._replace(
        noise=noise,
        taught=taught,
        chance=chance,
        states=expected.states + gain * off,
        covariances=expected.covariances - gain[:, None] * expected.covariances[0],
    )


def _begun(there: Tracks, new: Boxes) -> Tracks:
    count = len(new.places)
    states, covariances = np.zeros((3, _KINDS, count), np.complex128), np.zeros((3, 3, _KINDS, count))
    states[0] = new.places
    covariances[range(3), range(3)] = np.array([there.noise, _FASTEST**2, _MOST_ACCEL**2])[:, None, None]
    return there._replace(
        keys=tuple(new.keys),
        seen_ns=np.full(count, there.stamp_ns, np.int64),
        times=np.ones(count, np.intp),
        yaws=new.yaws,
        halves=new.halves,
        solid=new.halves,
        chance=np.full((_KINDS, count), 1.0 / _KINDS),
        states=states,
        covariances=covariances,
    )


def _joined(*parts: Tracks) -> Tracks:
    some = [part for part in parts if len(part.keys)]
    if len(some) <= 1:
        return some[0] if some else parts[0]
    keys = tuple(key for part in some for key in part.keys)
    flat = (np.concatenate([part[at] for part in some]) for at in range(4, 9))
    of_kinds = (np.concatenate([part[at] for part in some], axis=-1) for at in range(9, 12))
    return Tracks(*some[0][:3], keys, *flat, *of_kinds)
