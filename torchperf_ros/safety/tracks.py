"""Objects over time, of a source that sends no velocities.

Which detection is which object, and how fast each moves.

Each object has two Kalman filters of constant velocity, one for steady motion and one for braking, swerving
and pulling out, which are mixed by how well either foresees what is seen: an interacting multiple model
(Blom and Bar-Shalom 1988; Bar-Shalom, Li and Kirubarajan 2001, 11.6.6). How noisy a source's places are is
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
_JERKS: Final = np.array([[0.01], [4.0]])  # m^2/s^3, noise of the acceleration: 0.1 and 2 m/s in a second
_STAYS_S: Final = 1.0  # for which an object keeps to one of both kinds of motion
_FASTEST: Final = 15.0  # m/s, standard deviation of the velocity of what is seen for the first time
_MOST_SPEED: Final = 70.0  # m/s; what seems faster is not one object
_GATE: Final = 3.5  # standard deviations: so far from where it is expected an object may be
_LEAST_GATE: Final = 0.3**2  # m^2; nearer than 1.5 m there is no other object
_SAME_KEY: Final = 4.0  # of a pair's cost: an id that stays counts as much as two standard deviations
# standard deviations, by which the filters may have an object elsewhere than it was detected
_MOST_SHIFT: Final = 2.0
_NOISE_M: Final = (0.02, 0.1, 0.5)  # least, first and largest standard deviation of a detection's place
# The first guess of the noise counts as so many detections: with eight objects the noise is known after a second.
_GUESSED: Final = 10
_LEARNS: Final = 0.05  # of the noise in each array, once more detections than that have taught it


class Tracks(NamedTuple):
    """The objects of a source; shapes [n], and of each kind of motion [2, n].

    Attributes:
        stamp_ns: by the source's clock.
        noise: variance of a detection's place in m^2, along each axis.
        taught: how many detections have taught that.
        keys: `ns` and `id` of the last detection.
        seen_ns: when each was detected last.
        times: how often it was.
        yaws, halves: as it was detected last; halves [n, 2].
        chance: of each kind of motion.
        place, velocity: of each kind, as x + iy.
        pp, pv, vv: of each kind the covariance of both, the same along each axis.
    """

    stamp_ns: int
    noise: float
    taught: int
    keys: tuple[Key, ...]
    seen_ns: NDArray[np.int64]
    times: Numbers
    yaws: Floats
    halves: Floats
    chance: Floats
    place: Complex
    velocity: Complex
    pp: Floats
    pv: Floats
    vv: Floats

    @classmethod
    def none(cls, stamp_ns: int, noise: float = _NOISE_M[1] ** 2, taught: int = _GUESSED) -> "Tracks":
        flat, many, none = np.zeros(0), np.zeros((2, 0)), np.zeros((2, 0), np.complex128)
        seen_ns, count = np.zeros(0, np.int64), np.zeros(0, np.intp)
        objects = (seen_ns, count, flat, np.zeros((0, 2)))
        return cls(stamp_ns, noise, taught, (), *objects, many, none, none, many, many, many)

    def mean(self) -> tuple[Complex, Complex, Floats]:
        """Place, velocity and the standard deviation of that along each axis, of both kinds together."""
        place, velocity = (self.chance * self.place).sum(axis=0), (self.chance * self.velocity).sum(axis=0)
        variance = (self.chance * (self.vv + 0.5 * _squares(self.velocity - velocity))).sum(axis=0)
        return place, velocity, np.sqrt(variance)

    def only(self, kept: Numbers) -> "Tracks":
        return Tracks(
            self.stamp_ns,
            self.noise,
            self.taught,
            tuple(self.keys[at] for at in kept.tolist()),
            self.seen_ns[kept],
            self.times[kept],
            self.yaws[kept],
            self.halves[kept],
            self.chance[:, kept],
            self.place[:, kept],
            self.velocity[:, kept],
            self.pp[:, kept],
            self.pv[:, kept],
            self.vv[:, kept],
        )

    def moved(self, stamp_ns: int) -> "Tracks":
        dt = (stamp_ns - self.stamp_ns) / NS_PER_S
        changes = 0.5 * (1.0 - math.exp(-dt / _STAYS_S))
        shares = np.array([[1.0 - changes, changes], [changes, 1.0 - changes]])[:, :, None] * self.chance
        chance = shares.sum(axis=1)  # from the second kind to the first
        shares = shares / chance[:, None]
        place, velocity = (shares * self.place).sum(axis=1), (shares * self.velocity).sum(axis=1)
        off, faster = self.place - place[:, None], self.velocity - velocity[:, None]
        pp = (shares * (self.pp + 0.5 * _squares(off))).sum(axis=1)
        pv = (shares * (self.pv + 0.5 * (off * faster.conj()).real)).sum(axis=1)
        vv = (shares * (self.vv + 0.5 * _squares(faster))).sum(axis=1)
        pp = pp + dt * (2.0 * pv + dt * (vv + dt / 3.0 * _JERKS))
        pv = pv + dt * (vv + 0.5 * dt * _JERKS)
        return self._replace(
            stamp_ns=stamp_ns,
            chance=chance,
            place=place + dt * velocity,
            velocity=velocity,
            pp=pp,
            pv=pv,
            vv=vv + dt * _JERKS,
        )


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
        coasting: what counts as well: tracks that were not detected, and of each detection without a
            velocity that may be part of an object that moves, the same box at that velocity.
        left_out: how many objects within 500 m are more than can have tracks.
    """

    tracks: Tracks
    places: Complex
    velocities: Complex
    unsure: Floats
    unknown: int
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
    number, found, beside = _pairs(expected, places, keys, late_s)
    there = expected.only(number)
    if teaches:
        there = _corrected(there, places[found], late_s[found])
        there = there._replace(
            keys=tuple(keys[at] for at in found.tolist()),
            yaws=yaws[found],
            halves=halves[found],
            times=there.times + 1,
            seen_ns=np.full(len(found), stamp_ns, np.int64),
        )
    missed = expected.stamp_ns - expected.seen_ns <= _COAST_S * NS_PER_S
    missed[number] = False
    waiting, tracks = expected.only(missed.nonzero()[0]), expected
    coasting = waiting.only((waiting.times >= _SURE_AFTER).nonzero()[0])
    if teaches:
        is_new = np.ones(len(places), np.bool_)
        is_new[found] = False
        new = is_new.nonzero()[0]
        begun = _begun(there, places[new], yaws[new], halves[new], [keys[at] for at in new.tolist()])
        tracks = _joined(there, begun, waiting)._replace(noise=there.noise, taught=there.taught)
    if len(tracks.keys) > _MOST:
        tracks = tracks.only(_first(tracks, here))
    near = int((np.abs(places - here) <= FAR_M).sum() + (np.abs(coasting.mean()[0] - here) <= FAR_M).sum())
    velocities, unsure = np.zeros(len(places), np.complex128), np.full(len(places), _FASTEST)
    place, velocity, spread = there.mean()
    sure = (there.times >= _SURE_AFTER) & (np.abs(velocity) <= _MOST_SPEED)
    which = found[sure]
    velocities[which], unsure[which] = velocity[sure], spread[sure]
    # Where the filters have it, but never further from where it was seen than noise explains.
    shift = place[sure] - velocity[sure] * late_s[which] - places[which]
    beside[which] = -1
    loose = (beside >= 0).nonzero()[0]
    if len(loose):
        also = expected.only(beside[loose])
        at = np.stack(2 * [places[loose] + also.mean()[1] * late_s[loose]])
        coasting = _joined(coasting, also._replace(place=at, yaws=yaws[loose], halves=halves[loose]))
    places = places.copy()
    places[which] += shift / np.maximum(np.abs(shift) / (_MOST_SHIFT * math.sqrt(there.noise)), 1.0)
    return Tracked(
        tracks, places, velocities, unsure, len(places) - len(which), coasting, max(near - _MOST, 0)
    )


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


def _first(tracks: Tracks, here: complex) -> Numbers:
    """Which to keep.

    What counts before what was seen too seldom and is missed, then what moves, then the nearest.
    """
    place, velocity, unsure = tracks.mean()
    away = np.abs(place - here)
    seldom = (tracks.seen_ns < tracks.stamp_ns) & (tracks.times < _SURE_AFTER)
    order = np.lexsort((away, ~_moves(tracks, velocity, unsure), seldom, away > FAR_M))
    return np.sort(order[:_MOST])


def _pairs(
    expected: Tracks, places: Complex, keys: list[Key], late_s: Floats
) -> tuple[Numbers, Numbers, Numbers]:
    """Which track and which detection belong together.

    And which moving track fits each detection best, -1 for none.
    """
    beside = np.full(len(places), -1)
    if not len(expected.keys) or not len(places):
        return np.zeros(0, np.intp), np.zeros(0, np.intp), beside
    place, velocity, unsure = expected.mean()
    spread = (expected.chance * (expected.pp + 0.5 * _squares(expected.place - place))).sum(axis=0)
    variance = np.maximum(spread, expected.pp[1]) + max(
        expected.noise, _LEAST_GATE
    )  # that of the lively kind
    off = _squares(places + velocity[:, None] * late_s - place[:, None]) / variance[:, None]
    tracks, found = (off <= 2.0 * _GATE * _GATE).nonzero()  # of two axes
    cost = off[tracks, found] + 2.0 * np.log(variance)[tracks]
    same = [
        expected.keys[track] == keys[one]
        for track, one in zip(tracks.tolist(), found.tolist(), strict=True)
    ]
    cost -= _SAME_KEY * np.array(same, np.float64)
    taken, given = set[int](), dict[int, int]()
    order = np.argsort(cost, kind="stable")
    for at in order.tolist():
        track, one = int(tracks[at]), int(found[at])
        if track not in given and one not in taken:
            taken.add(one)
            given[track] = one
    moves = _moves(expected, velocity, unsure)
    of_moving = order[::-1][moves[tracks[order[::-1]]]]
    beside[found[of_moving]] = tracks[of_moving]  # of several for one detection the last is kept: the best
    return np.array(list(given), np.intp), np.array(list(given.values()), np.intp), beside


def _corrected(expected: Tracks, places: Complex, late_s: Floats) -> Tracks:
    """Tracks once they were detected there (Kalman 1960), with the noise that this teaches.

    By how much more or less than a filter foresees its squares are off, so much larger or smaller the noise is. Both
    filters teach it, each by how likely its kind of motion is.
    """
    if not len(places):
        return expected
    noise, taught = expected.noise, expected.taught
    off = places + expected.velocity * late_s - expected.place
    squares = 0.5 * _squares(off)
    variance = expected.pp + noise
    gain, gain_v = expected.pp / variance, expected.pv / variance
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
        place=expected.place + gain * off,
        velocity=expected.velocity + gain_v * off,
        pp=expected.pp - gain * expected.pp,
        pv=expected.pv - gain * expected.pv,
        vv=expected.vv - gain_v * expected.pv,
    )


def _begun(there: Tracks, places: Complex, yaws: Floats, halves: Floats, keys: list[Key]) -> Tracks:
    """Tracks of what is seen for the first time, beside these."""
    count = len(places)
    both, none = np.ones((2, count)), np.zeros((2, count))
    return there._replace(
        keys=tuple(keys),
        seen_ns=np.full(count, there.stamp_ns, np.int64),
        times=np.ones(count, np.intp),
        yaws=yaws,
        halves=halves,
        chance=0.5 * both,
        place=both * places,
        velocity=none.astype(np.complex128),
        pp=there.noise * both,
        pv=none,
        vv=_FASTEST**2 * both,
    )


def _joined(*parts: Tracks) -> Tracks:
    some = [part for part in parts if len(part.keys)]
    if len(some) <= 1:
        return some[0] if some else parts[0]
    keys = tuple(key for part in some for key in part.keys)
    flat = (np.concatenate([part[at] for part in some]) for at in range(4, 8))
    of_kinds = (np.concatenate([part[at] for part in some], axis=1) for at in range(8, 14))
    return Tracks(*some[0][:3], keys, *flat, *of_kinds)
