"""The markers of a `visualization_msgs/MarkerArray`, read from its CDR bytes.

What may be an object, and how it moves.

The reader takes CUBE, SPHERE, CYLINDER, each element of a CUBE_LIST or SPHERE_LIST, and ARROW. A
TEXT_VIEW_FACING is a label, no object. What another marker draws (lines, points, meshes) is not read, and
is noted in `unread`.
"""

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import aligned, byte_order, header_at, text_at
from torchperf_ros.api.errors import BadInput, one_line
from torchperf_ros.safety.odometry import LEAST_TURN, MOST_TURN

Floats = NDArray[np.float64]
# A marker's `ns` and `id`.
Key = tuple[bytes, int]

_ADD, _DELETE, _DELETE_ALL = 0, 2, 3  # visualization_msgs/Marker: actions
_ARROW, _SOLIDS, _LISTS, _TEXT = (
    0,
    (1, 2, 3),
    (6, 7),
    9,
)  # types; CUBE, SPHERE, CYLINDER; CUBE_LIST, SPHERE_LIST
_SHORTEST_MARKER: Final = 100  # bytes; what is padded to a multiple of four or eight is no marker
MOST_OBJECTS: Final = 4000  # reading them takes some 30 ms; an array of more is refused
_NO_TEXT = b"\1\0\0\0\0" + bytes(3)
# Points, colours, texture and coordinates of a marker that has none of them, little-endian, from
# the points on.
_NO_LISTS = bytes(8) + _NO_TEXT + bytes(8) + _NO_TEXT * 2 + bytes(8)
_NO_MESH = _NO_TEXT * 2 + bytes(4)
NO_ARROW: Final = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
_UNREADABLE: Final = (*NO_ARROW[:4], *3 * (float("nan"),))


class Markers:
    """The markers of one array, field by field, as they are: a value may be any number, or none.

    Attributes:
        keys, frames, stamps_ns: of each object: `ns` and `id`, `frame_id`, stamp (0 for none, -1 for no time).
        solids: of each object: position, orientation (x, y, z, w) and size along its own axes, shape [n,
            10].
        odd: whether its action is none of those that there are, shape [n].
        arrows: by key, orientation and vector of the ARROW; NaN where it has none, or several ARROWs
            contradict.
        stamp_ns: the last one of any marker that has a stamp, 0 for none: of an array without objects, too.
        labels: how many texts there are.
        unread: of each marker that is not read, or says nothing, why; what is cut off counts as one.
    """

    def __init__(self, message: bytes) -> None:
        """Read an array.

        Raises:
            BadInput: the bytes are no such array, or have more than 4,000 objects.
        """
        self.keys: list[Key] = []
        self.frames: list[bytes] = []
        self.stamps_ns: list[int] = []
        self.arrows: dict[Key, tuple[float, ...]] = {}
        self.stamp_ns = self.labels = 0
        self.unread: list[str] = []
        self._solids: list[tuple[float, ...]] = []
        self._odd: list[bool] = []
        try:
            self.order = byte_order(message)
            (count,) = struct.unpack_from(f"{self.order}I", message, 4)
        except (struct.error, IndexError) as error:
            raise BadInput(
                f"obstacles: {len(message)} bytes are no MarkerArray ({one_line(error)})"
            ) from error
        if count > MOST_OBJECTS:
            raise BadInput(f"obstacles: an array of {count} markers; at most {MOST_OBJECTS} are read")
        self._message, self._at = message, 8
        self._kind = struct.Struct(f"{self.order}3i")
        self._place = struct.Struct(f"{self.order}10d")
        self._count = struct.Struct(f"{self.order}I")
        for number in range(count):
            try:
                self._marker()
            except (struct.error, IndexError) as error:
                if not number:
                    raise BadInput(
                        f"obstacles: {len(message)} bytes are no MarkerArray ({one_line(error)})"
                    ) from error
                self.unread.append(
                    f"the array's {len(message)} bytes end within marker {number} of {count}"
                )
                break
        if not self.unread and (rest := len(message) - self._at) >= _SHORTEST_MARKER:
            self.unread.append(f"{rest} bytes lie behind the last of {count} markers")
        self.solids, self.odd = np.array(self._solids).reshape(-1, 10), np.array(self._odd, np.bool_)
        keys = set(self.keys)
        for ns, number in (key for key in self.arrows if key not in keys):
            self.unread.append(
                f"ARROW {ns.decode('utf-8', 'replace')!r} {number} has no object of its ns and id"
            )

    def _marker(self) -> None:
        message = self._message
        stamp_ns, frame, at = header_at(message, self._at, self.order)
        ns, at = text_at(message, at, self.order)
        at = aligned(at, 4)
        number, kind, action = self._kind.unpack_from(message, at)
        at = aligned(at + 12, 8)
        place = self._place.unpack_from(message, at)
        at = aligned(at + 80 + 16 + 8 + 1, 4)  # behind colour, lifetime and frame_locked
        end = self._end(at)
        self._at, self.stamp_ns = end, stamp_ns if stamp_ns > 0 else self.stamp_ns
        if action in {_DELETE, _DELETE_ALL}:
            return
        key = ns, number
        if kind in _SOLIDS:
            self._add(key, frame, stamp_ns, place, is_odd=action != _ADD)
        elif kind == _ARROW:
            arrow = self._arrow(at, place)
            self.arrows[key] = arrow if self.arrows.get(key, arrow) == arrow else _UNREADABLE
        elif kind in _LISTS and (elements := self._elements(at, place)):
            for one in elements:
                self._add(key, frame, stamp_ns, one, is_odd=action != _ADD)
        elif kind == _TEXT:
            self.labels += 1
        else:
            what = (
                "without points"
                if kind in _LISTS
                else "is not read; CUBE, SPHERE, CYLINDER and lists of them are"
            )
            self.unread.append(f"a marker of type {kind} {what}")

    def _add(
        self, key: Key, frame: bytes, stamp_ns: int, place: tuple[float, ...], *, is_odd: bool
    ) -> None:
        if len(self.keys) == MOST_OBJECTS:
            raise BadInput(
                f"obstacles: an array of more than {MOST_OBJECTS} objects; at most so many are read"
            )
        self.keys.append(key)
        self.frames.append(frame)
        self.stamps_ns.append(stamp_ns)
        self._solids.append(place)
        self._odd.append(is_odd)

    def _points(self, at: int) -> Floats:
        count = int(self._count.unpack_from(self._message, at)[0])
        begin = aligned(at + 4, 8)
        if not count:
            return np.zeros((0, 3))
        return (
            np.frombuffer(self._message, f"{self.order}f8", 3 * count, begin)
            .reshape(-1, 3)
            .astype(np.float64)
        )

    def _arrow(self, at: int, place: tuple[float, ...]) -> tuple[float, ...]:
        """Orientation and vector, NaN of one that has not two points, from the first to the second in m/s."""
        if self._count.unpack_from(self._message, at)[0] != 2:  # noqa: PLR2004 - from where and to where
            return _UNREADABLE
        begin_and_end = struct.unpack_from(f"{self.order}6d", self._message, aligned(at + 4, 8))
        return *place[3:7], *(begin_and_end[3 + axis] - begin_and_end[axis] for axis in range(3))

    def _elements(self, at: int, place: tuple[float, ...]) -> list[tuple[float, ...]]:
        """Each element of a list as an object of its own: its points are in the marker's axes."""
        points, pose = self._points(at), np.array(place[:7])
        turns, readable = rotations(np.broadcast_to(pose[3:], (len(points), 4)))
        with np.errstate(
            all="ignore"
        ):  # what is too large, or no number, stays so, and is found by who places it
            centres = pose[:3] + rotated(turns, points)
        centres[~readable] = np.nan  # where it lies is unknown
        return [(*centre, *place[3:]) for centre in centres.tolist()]

    def _end(self, at: int) -> int:
        message, order = self._message, self.order
        if message.startswith(_NO_LISTS, at):
            at += len(_NO_LISTS)
        else:
            at = self._list_end(at, 24, 8)  # points
            at = self._list_end(at, 16, 4)  # colours
            at = text_at(message, at, order)[1]  # texture_resource
            at = header_at(message, at, order)[2]  # texture: header, format, data
            at = self._list_end(text_at(message, at, order)[1], 1, 1)
            at = self._list_end(at, 8, 4)  # uv_coordinates
        at = aligned(text_at(message, at, order)[1], 4)  # text
        if message.startswith(_NO_MESH, at):
            at += len(_NO_MESH) + 1  # mesh_use_embedded_materials
        else:
            at = text_at(message, text_at(message, at, order)[1], order)[
                1
            ]  # mesh_resource, mesh_file's name
            at = self._list_end(at, 1, 1) + 1  # mesh_file's data, mesh_use_embedded_materials
        if at > len(message):
            raise struct.error(
                f"a marker of {at - self._at} bytes ends beyond the message's {len(message)}"
            )
        return at

    def _list_end(self, at: int, size: int, alignment: int) -> int:
        at = aligned(at, 4)
        count = int(self._count.unpack_from(self._message, at)[0])
        return aligned(at + 4, alignment) + count * size if count else at + 4


def rotations(turns: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Quaternions of length one, shape [n, 4], and which can be read; the others are no rotation.

    Readable ones are 0.1 to 10 long, or zeros, which messages have where it was not set: no rotation.
    """
    usable = np.all(np.abs(turns) <= MOST_TURN, axis=1)  # NaN compares false
    some = np.where(usable[:, None], turns, 0.0)
    lengths = np.linalg.norm(some, axis=1)
    turned = (lengths >= LEAST_TURN) & (lengths <= MOST_TURN)
    unit = np.where(turned[:, None], some / np.where(turned, lengths, 1.0)[:, None], NO_ARROW[:4])
    return unit, turned | (usable & ~np.any(turns, axis=1))


def rotated(turns: Floats, vectors: Floats) -> Floats:
    """Vectors turned: v + 2 w (u x v) + 2 u x (u x v), of the quaternions (u, w)."""
    across = 2.0 * np.cross(turns[:, :3], vectors)
    return np.asarray(vectors + turns[:, 3:] * across + np.cross(turns[:, :3], across))
