"""The way ahead that a plan draws, straightened: where a point lies along it and beside it."""

import cmath
import math

import numpy as np

from torchperf_ros.safety.limits import Complex, Floats, Track, largest, unit

# Beyond its ends, a lane goes on so far in the same bend.
_ARC_M = np.concatenate((np.arange(5.0, 60.0, 5.0), np.arange(60.0, 121.0, 10.0)))
_LONGEST_ARC_M = float(_ARC_M[-1])
# Over so much of a way the bend at an end is found, and over so many m: 10 m are half of a slow plan, in
# which a bend may have ended; less than 7 m show more of the poses' noise.
_OF_WAY, _BEND_M = 0.25, (7.0, 10.0)
_LEAST_BEND_M = 1.0  # a shorter way says little of a bend
_MOST_TURN = 1.2  # rad that it is led on for, at most
_FAR_M = 400.0  # and then straight on: further than anything that a guard looks at
_SAME_M = 1e-6  # two poses closer than this are one place
_BOTH_WAYS = 0.1  # of a way: so much of it may be driven in the other direction
# rad: 0.2 m aside after 100 m. A plan of 27 m/s that leaves a bend turns by 0.018, and leads 0.7 m aside.
_CURVED = 0.002
_BENT = 0.0005  # 1/m: 0.2 m aside after 30 m


class Lane:
    """A track's way, led on at both ends in its own bend.

    Attributes:
        s: distance along it in m of each of its points, 0 where the track begins and increasing; shape [m].
        own_s, own_place, own_unit: of each pose of the track, the same, x + iy, and its heading as x + iy.
        own_steps: way from each to the next in m.
        last_bend: of its last part, in 1/m; 0 where it does not bend.
        length: of the track's own part, in m.
        place: the points, as x + iy in m.
        heading: direction of travel in rad, shape [m].
        curved: whether it bends at all.
        tightest, turn: if so, its largest curvature in 1/m, and all that it turns, in rad.
        backward: whether the vehicle reverses along it.
        both_ways: whether the track goes forward and backward, so that there is no one direction of travel.
    """

    def __init__(self, track: Track, bend: float | None = None) -> None:
        """Take the way of a track that begins now.

        `bend`, in 1/m, is what the vehicle drives, and has come along.
        """
        place = self.own_place = track.place
        self.own_unit = unit(track.yaw)
        steps = place[1:] - place[:-1]
        lengths = self.own_steps = np.abs(steps)
        forth = float(np.vdot(self.own_unit[:-1], steps).real)
        self.own_s = np.zeros(len(place))
        lengths.cumsum(out=self.own_s[1:])
        self.length = float(self.own_s[-1])
        self.backward = forth < 0
        self.both_ways = self.length - abs(forth) > _BOTH_WAYS * (self.length + 1.0)
        heading = track.yaw + math.pi if self.backward else track.yaw
        self.curved = float(heading[heading.argmax()] - heading[heading.argmin()]) > _CURVED
        if bend is not None and abs(bend) > _BENT:
            self.curved = True
        own_s = self.own_s
        if lengths[lengths.argmin()] <= _SAME_M:  # so that no part of the lane has no direction
            moved = np.concatenate(((True,), lengths > _SAME_M))
            own_s, place, heading = own_s[moved], place[moved], heading[moved]
        more = 1 + len(_ARC_M) if self.curved else 1
        count = len(own_s) + 2 * more
        self.s, self.place, self.heading = np.empty(count), np.empty(count, np.complex128), np.empty(count)
        self.s[more:-more], self.place[more:-more], self.heading[more:-more] = own_s, place, heading
        self.last_bend = 0.0
        if self.curved:
            self._lead_on(own_s, bend)
        for end, inner, way_m in ((0, 1, -_FAR_M), (-1, -2, _FAR_M)):
            self.s[end], self.heading[end] = self.s[inner] + way_m, self.heading[inner]
            self.place[end] = self.place[inner] + cmath.rect(way_m, self.heading[inner])
        if self.curved:
            turns = np.abs(self.heading[1:] - self.heading[:-1])
            ways = np.maximum(self.s[1:] - self.s[:-1], _SAME_M)
            self.tightest, self.turn = largest(turns / ways), float(turns.sum())
        steps = self.place[1:] - self.place[:-1]
        # Parts far out, or back to where they began, may be of no length at all.
        lengths = np.maximum(np.abs(steps), _SAME_M)
        self._lengths, self._units = lengths, steps.conj() * (1.0 / lengths)

    def _lead_on(self, own_s: Floats, driven: float | None) -> None:
        """Fill in what lies before and behind the track's own part.

        Arcs with its bend at that end, or as driven.
        """
        first, last = 1 + len(_ARC_M), -2 - len(_ARC_M)
        over_m = min(max(_OF_WAY * self.length, _BEND_M[0]), _BEND_M[1])
        last_step = len(own_s) - 2
        near = min(max(int(own_s.searchsorted(over_m, side="right")) - 1, 1), last_step + 1)
        far = max(min(int(own_s.searchsorted(self.length - over_m)), last_step), 0)
        heading = self.heading
        ends = (
            (first, first + near, float(own_s[near]), -1),
            (first + far, last, self.length - float(own_s[far]), 1),
        )
        outwards, turned = np.empty((2, 2, len(_ARC_M)))
        for row, (begin, end, length_m, way) in enumerate(ends):
            bend = float(heading[end] - heading[begin]) / max(length_m, _LEAST_BEND_M)
            if way > 0:
                self.last_bend = bend
            elif driven is not None:
                bend = -driven if self.backward else driven
            scale = way * _MOST_TURN / max(abs(bend) * _LONGEST_ARC_M, _MOST_TURN)
            np.multiply(_ARC_M, scale, out=outwards[row])
            np.multiply(outwards[row], 0.5 * bend or 1e-12, out=turned[row])
        headings = heading[[first, last], None] + turned
        arcs = unit(headings)
        arcs *= outwards * (np.sin(turned) / turned)
        arcs += self.place[[first, last], None]
        headings += turned
        self.s[1:first], self.s[last + 1 : -1] = outwards[0, ::-1], outwards[1] + self.length
        self.place[1:first], self.place[last + 1 : -1] = arcs[0, ::-1], arcs[1]
        self.heading[1:first], self.heading[last + 1 : -1] = headings[0, ::-1], headings[1]

    def project(self, places: Complex) -> tuple[Floats, Floats, Floats]:
        """Of points x + iy, shape [n].

        Distance along the lane, distance to its left, and its heading there.
        """
        s, left = self.beside(places)
        return s, left, np.interp(s, self.s, self.heading)

    def beside(self, places: Complex) -> tuple[Floats, Floats]:
        """Of points x + iy, shape [n]: distance along the lane, and distance to its left."""
        off = (places[:, None] - self.place[:-1]) * self._units
        ahead, left = off.real.copy(), off.imag.copy()  # side by side in memory: faster from here on
        along = np.minimum(np.maximum(ahead, 0.0), self._lengths)
        ahead -= along
        nearest = (ahead * ahead + left * left).argmin(axis=1)
        at = nearest + np.arange(0, off.size, off.shape[1])
        return self.s.take(nearest) + along.take(at), left.take(at)

    def place_at(self, s: Floats, left: Floats) -> tuple[Complex, Floats]:
        """The points x + iy at these distances along the lane and to its left, and its heading there."""
        heading = np.interp(s, self.s, self.heading)
        return np.interp(s, self.s, self.place) + 1j * left * unit(heading), heading
