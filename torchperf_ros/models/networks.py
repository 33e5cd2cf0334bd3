"""The reference networks: detectors for camera and lidar, and a planner, and how weights get into them.

The lidar's network finds objects in points: pillars seen from above, convolutions, one box per cell. It is
after PointPillars (Lang et al., 2019), but without limits to pillars and points in a pillar: every point
counts, and nothing depends on their order. Its head is that of CenterNet (Zhou et al., "Objects as Points",
2019).
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from torchperf_ros.api.errors import ConfigError

SEED: Final = 20_240_229
# What ships.
#
# Trained by `torchperf train`; the model card beside it, `detector.md`, says how, and how well.
DETECTOR_WEIGHTS: Final = Path(__file__).with_name("weights") / "detector.safetensors"
# Intersection over union from which on two boxes are of one object, as PASCAL VOC has it.
LEAST_OVERLAP: Final = 0.5
# Likewise; see `planner.md`.
PLANNER_WEIGHTS: Final = DETECTOR_WEIGHTS.with_name("planner.safetensors")
# Likewise; see `lidar.md`.
LIDAR_WEIGHTS: Final = DETECTOR_WEIGHTS.with_name("lidar.safetensors")
CLASSES: Final = ("car", "truck", "cyclist", "pedestrian")

IMAGE_HEIGHT: Final = 256
IMAGE_WIDTH: Final = 448
STRIDE: Final = 8
GRID_CELLS: Final = (IMAGE_HEIGHT // STRIDE) * (IMAGE_WIDTH // STRIDE)
_LARGEST_LOG: Final = 4.0  # of a box's size in cells: 437 pixels
BOX_FIELDS: Final = 5  # score, centre x, centre y, width, height; the class logits follow

HISTORY_FRAMES: Final = 10
# Objects per frame that the planner sees, nearest first.
NEAREST: Final = 8
OBJECT_FIELDS: Final = 6  # forward, left, length, width, height, score
EGO_FIELDS: Final = 2  # speed m/s, yaw rate rad/s
# Values per frame of the planner's history.
#
# The nearest objects, zeros where there are fewer, then its own motion.
FRAME_FEATURES: Final = NEAREST * OBJECT_FIELDS + EGO_FIELDS
WAYPOINTS: Final = 30
WAYPOINT_STEP_S: Final = 0.1

# Measured on one thread of a server CPU, eager: about 25, 10 and 3 ms (detector); 3, 1.5 and 0.7 ms
# (planner).
DETECTOR_WIDTHS: Final = {"full": 48, "medium": 30, "fast": 12}
PLANNER_WIDTHS: Final = {"full": 320, "medium": 224, "fast": 128}

_MAX_ACCELERATION: Final = 1.5  # m/s^2, longitudinal and lateral: what passengers find comfortable
# m/s^2; what `plan_along`, which the planner imitates, brakes with in an emergency
_MAX_BRAKING: Final = 6.0
_STANDING: Final = 1e-3  # m/s
_MAX_CURVATURE: Final = 0.02  # 1/m, a turn of 50 m radius
_KNOTS: Final = 6  # of a correction over 3 s; between two it changes evenly, which bounds jerk and steering
# m/s; below it the learned part fades, so that a standing vehicle stays
_FULL_ACCELERATION_SPEED: Final = 2.0

_Network = TypeVar("_Network", bound=nn.Module)


def tier_width(tier: str, widths: dict[str, int]) -> int:
    """The width of a tier.

    Raises:
        ConfigError: there is no such tier; the message names it and those that exist.
    """
    if tier not in widths:
        raise ConfigError(f"tier {tier!r} does not exist; allowed: {', '.join(widths)}")
    return widths[tier]


def build_seeded(make: Callable[[], _Network]) -> _Network:
    """A network in eval mode whose weights depend on `SEED` and its shape only.

    Global random state is untouched.

    Biases are zero and weights He-normal (He et al., "Delving Deep into Rectifiers", 2015), which keeps
    activations of one size through any number of ReLU layers. `make` builds the network on the CPU.
    """
    with torch.random.fork_rng(devices=[]):  # torch's own initialisers draw from the CPU's global generator
        network = make()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
            else:
                parameter.zero_()
    return network.requires_grad_(requires_grad=False).eval()


def build_trained(make: Callable[[], _Network], tier: str, weights: Path) -> _Network:
    """A network as of `build_seeded` with the weights of a tier in a file that `torchperf train` has written.

    Raises:
        ConfigError: the file cannot be read, or holds another network's weights.
    """
    network = build_seeded(make)
    load_weights(network, tier, weights)
    return network


def width_in(weights: Path, tier: str, usual: int) -> int:
    """Width of a tier's layers as the file says, where they were pruned; as usual where it says nothing."""
    try:
        with safe_open(weights, framework="pt") as file:
            return int(json.loads((file.metadata() or {}).get("widths", "{}")).get(tier, usual))
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError):
        return usual  # `load_weights` says what is wrong


def load_weights(network: nn.Module, tier: str, weights: Path) -> None:
    """Put the weights of a tier in a safetensors file, named `TIER.NAME` as in `state_dict`, into a network.

    All of them or none.

    Raises:
        ConfigError: as `build_trained`.
    """
    own = network.state_dict()
    try:
        with safe_open(weights, framework="pt") as file:
            names = set(file.keys())
            found = {name: file.get_tensor(f"{tier}.{name}") for name in own if f"{tier}.{name}" in names}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"weights {weights}: {error}; `torchperf train -o FOLDER` writes such a file"
        ) from error
    tiers = sorted({name.partition(".")[0] for name in names})
    if tier not in tiers:
        raise ConfigError(
            f"weights {weights}: tier {tier!r} is not there, only {', '.join(tiers) or 'nothing'}"
        )
    for name, value in own.items():
        if name not in found or found[name].shape != value.shape:
            there = f"is {list(found[name].shape)}" if name in found else "is missing"
            raise ConfigError(
                f"weights {weights}: {tier}.{name} {there} where this network has {list(value.shape)};"
                " they are of another architecture"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016), normalisation folded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, [batch, width, rows, columns]."""
        return functional.relu(x + self.second(functional.relu(self.first(x))))


class DetectorNet(nn.Module):
    """Single-stage convolutional detector, one box for each cell of 8x8 pixels.

    A residual backbone down to stride 16, whose last features join those of stride 8 (Lin et al., "Feature
    Pyramid Networks", 2017). As in CenterNet (Zhou et al., "Objects as Points", 2019) a cell counts only
    where its score is the highest of its 3x3 neighbourhood, so no other suppression is needed.
    """

    column: Tensor
    row: Tensor

    def __init__(self, width: int) -> None:
        """Make the layers, of `width` channels at stride 4, twice as many at 8, four times at 16."""
        super().__init__()
        self.fine = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            Residual(width),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            Residual(2 * width),
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            Residual(4 * width),
            Residual(4 * width),
            nn.Conv2d(4 * width, 2 * width, 1),
        )
        self.head = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, BOX_FIELDS + len(CLASSES), 1),
        )
        rows, columns = IMAGE_HEIGHT // STRIDE, IMAGE_WIDTH // STRIDE
        self.register_buffer(
            "column", torch.arange(columns, dtype=torch.float32).view(1, 1, columns), persistent=False
        )
        self.register_buffer(
            "row", torch.arange(rows, dtype=torch.float32).view(1, rows, 1), persistent=False
        )
        # missing in torch's overloads
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def cells(self, image: Tensor) -> Tensor:
        """What the head gives for an image as of `forward`, [batch, 9, 32, 56].

        These are logits of the score and of the centre's place in the cell (2), logarithms of width and
        height in cells (2), and class logits (4).
        """
        fine = self.fine(image.contiguous(memory_format=torch.channels_last))
        coarse = functional.interpolate(self.coarse(fine), scale_factor=2.0, mode="nearest")
        found: Tensor = self.head(functional.relu(fine + coarse))
        return found

    def forward(self, image: Tensor) -> Tensor:
        """Detect.

        Args:
            image: [batch, 3, 256, 448] float in -1..1, RGB.

        Returns:
            [batch, 1792, 9]: one row per cell with score 0..1 (0 unless a local maximum), box centre x, y and
            width, height as fractions of the image, 4 class logits.
        """
        # In bf16 a centre beyond column 32 would lie on quarters of a cell, 2 pixels: too far off for small
        # boxes.
        cells = self.cells(image).float()
        logit = cells[:, 0]
        # Compared before the sigmoid: a compiler may compute that twice, and not to the same last bit.
        is_peak = logit == functional.max_pool2d(logit, 3, stride=1, padding=1)
        score = torch.where(is_peak, torch.sigmoid(logit), torch.zeros_like(logit))
        offset, size = (
            torch.sigmoid(cells[:, 1:3]),
            torch.exp(cells[:, 3:5].clamp(-_LARGEST_LOG, _LARGEST_LOG)),
        )
        x = (self.column + offset[:, 0]) * (STRIDE / IMAGE_WIDTH)
        y = (self.row + offset[:, 1]) * (STRIDE / IMAGE_HEIGHT)
        width, height = size[:, 0] * (STRIDE / IMAGE_WIDTH), size[:, 1] * (STRIDE / IMAGE_HEIGHT)
        box = torch.stack((score, x, y, width, height), dim=1)
        return torch.cat((box, cells[:, BOX_FIELDS:]), dim=1).flatten(2).transpose(1, 2)


def corners(cells: np.ndarray) -> np.ndarray:
    """Left, top, right, bottom of the boxes in cells [n, 9], see `DetectorNet.forward`, as fractions.

    [n, 4].
    """
    centre, half = cells[:, 1:3], cells[:, 3:BOX_FIELDS] / 2
    return np.concatenate((centre - half, centre + half), axis=1)


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes [n, 4] and [m, 4], left, top, right, bottom: [n, m]."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    inside: np.ndarray = np.prod(np.clip(high - low, 0.0, None), axis=2)
    areas = [np.prod(each[:, 2:] - each[:, :2], axis=1) for each in (a, b)]
    shares: np.ndarray = inside / np.maximum(areas[0][:, None] + areas[1][None] - inside, 1e-9)
    return shares


class PlannerNet(nn.Module):
    """Temporal network over the objects of the last frames.

    Each object passes the same layers, and each frame keeps the largest of every channel (Qi et al.,
    "PointNet", 2017): the order of the objects does not matter. Convolutions over time read the frames. The
    output is a bounded correction of acceleration and curvature at six times, on top of constant speed and
    yaw rate. The path therefore stays drivable with any weights: it accelerates by 1.5 m/s^2 at
    most and brakes by 6, lateral corrections stay within 1.5 m/s^2, speed never changes sign, and a
    standing vehicle stays.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seen = nn.Linear(OBJECT_FIELDS, width)
        self.objects = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.motion = nn.Linear(EGO_FIELDS, width)
        self.time = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(2))
        self.ego = nn.Linear(EGO_FIELDS, width)
        self.hidden = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 2 * _KNOTS)

    def forward(self, history: Tensor, mask: Tensor, ego: Tensor) -> Tensor:
        """Plan.

        Args:
            history: [batch, 10, 50] float, oldest first, see `FRAME_FEATURES`.
            mask: [batch, 10] bool, True where a row holds a frame; the others are not read.
            ego: [batch, 2] float: speed in m/s (negative in reverse), yaw rate in rad/s, left positive.

        Returns:
            [batch, 30, 4]: x, y in m and heading in rad relative to the vehicle (x forward, y left) and
            speed in m/s, at 0.1 s to 3.0 s from now.
        """
        x, present = self._frames(history, mask)
        for layer in self.time:
            x = (x + functional.relu(layer(x))) * present
        return self._plan(x, present, ego)

    def steps(self, history: Tensor, mask: Tensor, ego: Tensor) -> Iterator[Tensor]:
        """Plan from coarse to fine.

        From each frame alone, then with each layer over time; the last is `forward`'s.

        Every layer only adds to what is there, so that one head serves all of them: early exits as in
        BranchyNet (Teerapittayanon et al., 2016).
        """
        x, present = self._frames(history, mask)
        yield self._plan(x, present, ego)
        for layer in self.time:
            x = (x + functional.relu(layer(x))) * present
            yield self._plan(x, present, ego)

    def _frames(self, history: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.where(mask.unsqueeze(2), history, 0.0)
        objects = rows[:, :, :-EGO_FIELDS].unflatten(2, (NEAREST, OBJECT_FIELDS))
        x = functional.relu(self.seen(objects))
        for layer in self.objects:
            x = x + functional.relu(layer(x))
        there = (objects != 0.0).any(dim=3, keepdim=True)
        x = torch.where(there, x, 0.0).amax(dim=2) + functional.relu(self.motion(rows[:, :, -EGO_FIELDS:]))
        present = mask.to(history.dtype).unsqueeze(1)
        return x.transpose(1, 2) * present, present

    def _plan(self, x: Tensor, present: Tensor, ego: Tensor) -> Tensor:
        mean = x.sum(dim=2) / present.sum(dim=2).clamp(min=1.0)
        hidden = functional.relu(self.hidden(torch.cat((mean, x[:, :, -1]), dim=1)) + self.ego(ego * 0.1))
        knots = torch.tanh(self.head(hidden)).view(-1, 2, _KNOTS)
        correction = functional.interpolate(knots, WAYPOINTS, mode="linear", align_corners=True)
        return roll_out(ego, correction.transpose(1, 2))


def roll_out(ego: Tensor, correction: Tensor) -> Tensor:
    """Waypoints of constant speed and yaw rate with a bounded correction, integrated by the midpoint rule.

    Where the vehicle brakes, the bend stays as it is: the yaw rate falls with the speed.

    Args:
        ego: [batch, 2] speed in m/s and yaw rate in rad/s.
        correction: [batch, 30, 2] in -1..1: acceleration, as a fraction of 1.5 m/s^2 or, where it is
            negative, of 6 m/s^2; and curvature, as a fraction of 0.02/m or of what 1.5 m/s^2 of lateral
            acceleration allow, whichever is less.

    Returns:
        [batch, 30, 4], see `PlannerNet.forward`.
    """
    start, yaw_rate = ego[:, 0:1], ego[:, 1:2]
    fade = (start.abs() / _FULL_ACCELERATION_SPEED).clamp(max=1.0)
    most = torch.where(correction[:, :, 0] < 0.0, _MAX_BRAKING, _MAX_ACCELERATION)
    gained = torch.cumsum(correction[:, :, 0] * most * (fade * WAYPOINT_STEP_S), dim=1)
    speed = torch.sign(start) * (start.abs() + gained).clamp(min=0.0)
    middle = 0.5 * (speed + torch.cat((start, speed[:, :-1]), dim=1))
    share = (middle.abs() / start.abs().clamp(min=_STANDING)).clamp(max=1.0)
    tightest = (_MAX_ACCELERATION / (middle * middle).clamp(min=1.0)).clamp(max=_MAX_CURVATURE)
    turned = (yaw_rate * share + correction[:, :, 1] * tightest * middle) * WAYPOINT_STEP_S
    heading = torch.cumsum(turned, dim=1)
    towards = heading - 0.5 * turned
    travelled = middle * WAYPOINT_STEP_S
    x = torch.cumsum(travelled * torch.cos(towards), dim=1)
    y = torch.cumsum(travelled * torch.sin(towards), dim=1)
    return torch.stack((x, y, heading, speed), dim=2)


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
_CELL_PILLARS: Final = 2
CELL_M: Final = _PILLAR_M * _CELL_PILLARS
GRID_ROWS, GRID_COLUMNS = _ROWS // _CELL_PILLARS, _COLUMNS // _CELL_PILLARS
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
