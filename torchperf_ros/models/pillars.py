"""A network that finds objects in the points of a lidar.

Pillars seen from above, convolutions, one box per cell.

After PointPillars (Lang et al., 2019), but without limits to pillars and points in a pillar: every point
counts, and nothing depends on their order. The head is that of CenterNet (Zhou et al., "Objects as Points",
2019).
"""

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from torchperf_ros.models.networks import CLASSES, Residual

# CPU time of one thread on a busy server, eager, 24,000 points: about 25, 14 and 11 ms; `fast` from its
# package 5.
PILLAR_WIDTHS: Final = {"full": 32, "medium": 16, "fast": 8}
AHEAD_M: Final = 76.8
# The grid: so far ahead of the points' origin, and so far to either side.
BESIDE_M: Final = 38.4
MOST_POINTS: Final = 120_000
# Points outside of the grid before those of every cloud, as compilers make code of their own for
# sizes 0 and 1.
SPARE_POINTS: Final = 2
# One of them.
OUTSIDE: Final = (-1000.0, 0.0, 0.0, 0.0)

_PILLAR_M: Final = 0.4
_ROWS, _COLUMNS = round(2 * BESIDE_M / _PILLAR_M), round(AHEAD_M / _PILLAR_M)  # of pillars: y, x
# Pillars in a row to a cell of the output.
STRIDE: Final = 2
CELL_M: Final = _PILLAR_M * STRIDE
GRID_ROWS, GRID_COLUMNS = _ROWS // STRIDE, _COLUMNS // STRIDE
# Of a cell: logit, centre in cells (2), log of length and width, sine and cosine of twice the yaw,
# class logits.
MAP_FIELDS: Final = 7 + len(CLASSES)
_POINT_FIELDS: Final = 8
_PRIOR: Final = -4.6  # logit of 0.01: what an untrained cell begins with (Lin et al., "Focal Loss", 2017)
# logits; on flat ground neighbours differ by rounding only, which no two compilers do alike
_SAME: Final = 1e-4
_LOG_SIZES: Final = (-1.5, 3.5)  # 0.2 to 33 m


class PillarNet(nn.Module):
    """Finds boxes in any number of points, on the CPU and on CUDA with the same result in any order."""

    def __init__(self, width: int) -> None:
        """Make the layers: so many channels at 0.8 m, twice as many at 1.6 m and 3.2 m."""
        super().__init__()
        pillar = max(16, width // 2)
        self.point = nn.Linear(_POINT_FIELDS, pillar)
        self.fine = nn.Sequential(
            nn.Conv2d(pillar, width, 3, stride=2, padding=1), nn.ReLU(), Residual(width)
        )
        self.middle = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), Residual(2 * width)
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), Residual(2 * width)
        )
        self.from_coarse, self.from_middle = (
            nn.Conv2d(2 * width, 2 * width, 1),
            nn.Conv2d(2 * width, width, 1),
        )
        self.head = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, MAP_FIELDS, 1)
        )
        # missing in torch's overloads
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, points: Tensor) -> Tensor:
        """Detect in one cloud.

        Args:
            points: [n, 4] float: x ahead, y to the left, z above the ground in m, and intensity 0..1. Those
                outside of the grid say nothing; n has to be `SPARE_POINTS` or more where it is compiled.

        Returns:
            [1, 9216, 11]: one row per cell of 0.8 m with score 0..1 (0 unless the highest of its 3x3 neighbourhood),
            centre x, y, length and width in m, sine and cosine of twice the yaw, 4 class logits.
        """
        maps = self.maps(points, torch.zeros_like(points[:, 0], dtype=torch.int64), 1)
        logit = maps[:, :1]
        is_peak = logit >= functional.max_pool2d(logit, 3, stride=1, padding=1) - _SAME
        score = torch.where(is_peak, torch.sigmoid(logit), torch.zeros_like(logit))
        column = torch.arange(GRID_COLUMNS, dtype=maps.dtype, device=maps.device).view(1, 1, 1, -1)
        row = torch.arange(GRID_ROWS, dtype=maps.dtype, device=maps.device).view(1, 1, -1, 1)
        x, y = (column + maps[:, 1:2]) * CELL_M, (row + maps[:, 2:3]) * CELL_M - BESIDE_M
        size = torch.exp(maps[:, 3:5].clamp(*_LOG_SIZES))
        return torch.cat((score, x, y, size, maps[:, 5:]), dim=1).flatten(2).transpose(1, 2)

    def maps(self, points: Tensor, cloud: Tensor, clouds: int) -> Tensor:
        """What the head says of each cell, for training.

        Args:
            points: [n, 4], see `forward`, of all clouds together.
            cloud: [n] int64, which one each is of.
            clouds: how many there are.

        Returns:
            [clouds, 11, 96, 96], see `MAP_FIELDS`.
        """
        x = self.fine(self._pillars(points, cloud, clouds))
        middle = self.middle(x)
        coarse = self.coarse(middle)
        middle = functional.relu(middle + _twice(self.from_coarse(coarse)))
        x = functional.relu(x + _twice(self.from_middle(middle)))
        maps: Tensor = self.head(x)
        offset, rest = torch.sigmoid(maps[:, 1:3]) * 2.0 - 0.5, maps[:, 3:]
        return torch.cat((maps[:, :1] + _PRIOR, offset, rest), dim=1)

    def _pillars(self, points: Tensor, cloud: Tensor, clouds: int) -> Tensor:
        """The largest of what its points say in each pillar, 0 where there is none.

        [clouds, channels, 192, 192].
        """
        x, y, z, intensity = points.unbind(1)
        across, along = (y + BESIDE_M) / _PILLAR_M, x / _PILLAR_M
        row, column = across.floor(), along.floor()
        inside = (row >= 0) & (row < _ROWS) & (column >= 0) & (column < _COLUMNS)
        place = torch.where(inside, row * _COLUMNS + column, 0.0).to(torch.int64) + cloud * (
            _ROWS * _COLUMNS
        )
        place = torch.where(inside, place, clouds * _ROWS * _COLUMNS)  # a spare pillar, which is cut off
        fields = (x / AHEAD_M, y / BESIDE_M, z, z * z, intensity, along - column - 0.5, across - row - 0.5)
        reported = functional.relu(self.point(torch.stack((*fields, torch.ones_like(x)), dim=1)))
        pillars = reported.new_zeros(clouds * _ROWS * _COLUMNS + 1, reported.shape[1])
        pillars = pillars.scatter_reduce(
            0, place.unsqueeze(1).expand_as(reported), reported, "amax", include_self=True
        )
        return pillars[:-1].view(clouds, _ROWS, _COLUMNS, -1).permute(0, 3, 1, 2)


def _twice(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")


class CloudBox(NamedTuple):
    """One object, seen from above.

    Attributes:
        class_index: index into `CLASSES`.
        score: 0..1.
        x, y: of its centre in m, ahead and to the left.
        length, width: m.
        yaw: rad, -pi/2 to pi/2: a box looks the same from both ends.
    """

    class_index: int
    score: float
    x: float
    y: float
    length: float
    width: float
    yaw: float


def strongest(cells: NDArray[np.float32], least_score: float, most: int) -> list[CloudBox]:
    """The boxes of one cloud, [9216, 11] as `PillarNet.forward` gives them, the strongest first."""
    found = np.flatnonzero(cells[:, 0] >= least_score)
    found = found[np.argsort(-cells[found, 0], kind="stable")[:most]]
    rows = cells[found].astype(np.float64)
    yaws = 0.5 * np.arctan2(rows[:, 5], rows[:, 6])
    kinds = rows[:, 7:].argmax(axis=1)
    values = np.column_stack((rows[:, :5], yaws)).tolist()
    return [CloudBox(kind, *row) for kind, row in zip(kinds.tolist(), values, strict=True)]


def spare(points: NDArray[np.float32]) -> Tensor:
    """The points [n, 4] as `forward` wants them, behind the spare ones: [n + 2, 4]."""
    given = torch.empty((len(points) + SPARE_POINTS, len(OUTSIDE)))
    given[:SPARE_POINTS] = torch.tensor(OUTSIDE)
    given[SPARE_POINTS:] = torch.from_numpy(points)
    return given
