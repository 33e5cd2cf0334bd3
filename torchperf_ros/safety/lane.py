"""The way ahead that a plan draws, straightened: where a point lies along it and beside it."""

import math

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.safety.limits import Track

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]

_ARC_M = np.arange(5.0, 61.0, 5.0)  # beyond its ends, a lane goes on so far in the same bend
_BEND_M = 10.0  # over which the bend at an end is found
_LEAST_BEND_M = 1.0  # a shorter way says little of a bend
_MOST_TURN = 1.2  # rad that it is led on for, at most
_FAR_M = 400.0  # and then straight on: further than anything that a guard looks at
_SAME_M = 1e-6  # two poses closer than this are one place
_BOTH_WAYS = 0.1  # of a way: so much of it may be driven in the other direction
_CURVED = 0.002  # rad: 0.2 m aside after 100 m; a plan of 33 m/s that leaves a bend turns by 0.018 and leads 0.9 m aside


def unit(angles: Floats) -> Complex:
    """Directions as complex numbers of length 1; numpy's complex exponential takes three times as long."""
    found = np.empty(np.shape(angles), np.complex128)
    found.real, found.imag = np.cos(angles), np.sin(angles)
    return found


class Lane:
    """A track's way, led on at both ends in its own bend.

    Attributes:
        s: distance along it in m of each of its points, 0 where the track begins and increasing; shape [m].
        own_s: the same of each pose of the track.
        length: of the track's own part, in m.
        place: the points, as x + iy in m.
        heading: direction of travel in rad, shape [m].
        curved: whether it bends at all.
        backward: whether the vehicle reverses along it.
        both_ways: whether the track goes forward and backward, so that there is no one direction of travel.
    """

    def __init__(self, track: Track) -> None:
        """Take the way of a track that begins now."""
        place = track.x + 1j * track.y
        steps = place[1:] - place[:-1]
        lengths = np.abs(steps)
        forth = float((steps * unit(-track.yaw[:-1])).real.sum())
        self.own_s = np.concatenate(((0.0,), lengths.cumsum()))
        self.length = float(self.own_s[-1])
        self.backward = forth < 0
        self.both_ways = self.length - abs(forth) > _BOTH_WAYS * (self.length + 1.0)
        heading = track.yaw + math.pi if self.backward else track.yaw
        self.curved = float(heading.max() - heading.min()) > _CURVED
        own_s = self.own_s
        if lengths.min() <= _SAME_M:  # so that no part of the lane has no direction
            moved = np.concatenate(((True,), lengths > _SAME_M))
            own_s, place, heading = own_s[moved], place[moved], heading[moved]
        back, on = self._led_on(own_s, place, heading, -1.0), self._led_on(own_s, place, heading, 1.0)
        self.s = np.concatenate((back[0][::-1], own_s, on[0] + self.length))
        self.place = np.concatenate((back[1][::-1], place, on[1]))
        self.heading = np.concatenate((back[2][::-1], heading, on[2]))
        steps = self.place[1:] - self.place[:-1]
        self._lengths = np.abs(steps)[:, None]
        self._units = steps[:, None].conj() / self._lengths

    def _led_on(self, own_s: Floats, place: Complex, heading: Floats, way: float) -> tuple[Floats, Complex, Floats]:
        """Distances from an end, outwards (`way` -1: before the first point), with places and headings there."""
        end = 0 if way < 0 else -1
        if not self.curved:
            return (
                np.array([way * _FAR_M]),
                place[end : end + 1 or None] + way * _FAR_M * unit(heading[end]),
                heading[:1],
            )
        near = np.abs(own_s - own_s[end]) <= _BEND_M
        turn = float(heading[near][-1] - heading[near][0])
        bend = turn / max(float(own_s[near][-1] - own_s[near][0]), _LEAST_BEND_M)
        out = way * _ARC_M * min(1.0, _MOST_TURN / max(abs(bend) * float(_ARC_M[-1]), _MOST_TURN))
        turned = 0.5 * bend * out
        arc = place[end] + out * np.sinc(turned / math.pi) * unit(heading[end] + turned)
        headings = heading[end] + 2.0 * turned
        far = arc[-1:] + way * _FAR_M * unit(headings[-1:])
        return (
            np.concatenate((out, out[-1:] + way * _FAR_M)),
            np.concatenate((arc, far)),
            np.concatenate((headings, headings[-1:])),
        )

    def project(self, places: Complex) -> tuple[Floats, Floats, Floats]:
        """Of points x + iy, shape [n]: distance along the lane, distance to its left, and its heading there."""
        off = (places - self.place[:-1, None]) * self._units  # along as real, left as imaginary part
        along = np.minimum(np.maximum(off.real, 0.0), self._lengths)
        nearest = ((off.real - along) ** 2 + off.imag**2).argmin(axis=0)
        columns = np.arange(len(places))
        s = self.s[nearest] + along[nearest, columns]
        return s, off.imag[nearest, columns], np.interp(s, self.s, self.heading)

    def place_at(self, s: Floats, left: Floats) -> tuple[Complex, Floats]:
        """The points x + iy at these distances along the lane and to its left, and its heading there."""
        heading = np.interp(s, self.s, self.heading)
        return np.interp(s, self.s, self.place) + 1j * left * unit(heading), heading
