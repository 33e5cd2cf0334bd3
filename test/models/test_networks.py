import hashlib
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines.model_transforms import matrix_precision
from torchperf_ros.models import networks
from torchperf_ros.models.networks import (
    FRAME_FEATURES,
    HISTORY_FRAMES,
    NEAREST,
    OBJECT_FIELDS,
    WAYPOINTS,
    DetectorNet,
    PillarNet,
    PlannerNet,
    build_seeded,
    roll_out,
)

BIAS = "fast.head.2.bias"
NAN = float("nan")


def detector(width: int = 12) -> DetectorNet:
    return build_seeded(lambda: DetectorNet(width))


def planner(width: int = 64) -> PlannerNet:
    return build_seeded(lambda: PlannerNet(width))


def lidar(width: int = 8) -> PillarNet:
    return build_seeded(lambda: PillarNet(width))


def images() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shape = (1, 3, networks.IMAGE_HEIGHT, networks.IMAGE_WIDTH)
    coarse = torch.rand((1, 3, 8, 14), generator=random)
    return {
        "black": torch.full(shape, -1.0),
        "white": torch.ones(shape),
        "noise": torch.rand(shape, generator=random) * 2 - 1,
        "ramp": torch.linspace(-1, 1, networks.IMAGE_WIDTH).expand(shape),
        "blobs": torch.nn.functional.interpolate(coarse, shape[2:], mode="bilinear") * 2 - 1,
    }


@pytest.mark.parametrize("make", [detector, planner, lidar])
def test_given_two_builds_when_compared_then_the_weights_are_equal_and_global_randomness_is_untouched(make):
    torch.manual_seed(1)
    first = make().state_dict()
    torch.rand(5)
    before = torch.get_rng_state()
    second = make().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tier", networks.DETECTOR_WIDTHS)
def test_given_any_image_when_detecting_then_outputs_are_finite_and_of_no_road_there_are_hardly_any_boxes(
    tier,
):
    width = networks.DETECTOR_WIDTHS[tier]
    network = networks.build_trained(lambda: DetectorNet(width), tier, networks.DETECTOR_WEIGHTS)
    for name, image in images().items():
        with torch.inference_mode():
            cells = network(image)
        assert cells.shape == (1, networks.GRID_CELLS, 5 + len(networks.CLASSES))
        assert cells.isfinite().all()
        score, centre, size = cells[0, :, 0], cells[0, :, 1:3], cells[0, :, 3:5]
        assert 0 <= score.min() <= score.max() <= 1
        assert (score > 0.5).sum() <= 1, name
        assert 0 <= centre.min() <= centre.max() <= 1
        assert 0 < size.min() <= size.max() < 1.71, "as the clamp of a box says"


def detector_file(path, **changes):
    """Weights of the fast tier as a file, some of them changed, or left out where they are None."""
    own = {f"fast.{name}": value.contiguous() for name, value in detector().named_parameters()}
    save_file({name: value for name, value in {**own, **changes}.items() if value is not None}, path)
    return path


def test_given_a_file_of_weights_when_loaded_then_all_are_there_and_any_that_does_not_fit_is_named(
    tmp_path,
):
    bias = torch.full((9,), 0.5)
    network = networks.build_trained(
        lambda: DetectorNet(12), "fast", detector_file(tmp_path / "a", **{BIAS: bias})
    )
    assert torch.equal(network.head[-1].bias, bias)
    path = tmp_path / "b"
    for changes, says in (
        ({BIAS: None}, f"{BIAS} is missing where this network has .9.; they are of another architecture"),
        ({BIAS: torch.zeros(4)}, f"{BIAS} is .4. where this network has .9."),
    ):
        with pytest.raises(ConfigError, match=says):
            networks.build_trained(lambda: DetectorNet(12), "fast", detector_file(path, **changes))
    with pytest.raises(ConfigError, match="tier 'full' is not there, only fast"):
        networks.build_trained(lambda: DetectorNet(48), "full", path)
    path.write_bytes(detector_file(path).read_bytes()[:-100])
    with pytest.raises(ConfigError, match="weights .*b: .*`torchperf train -o FOLDER` writes such a file"):
        networks.build_trained(lambda: DetectorNet(12), "fast", path)
    with pytest.raises(ConfigError, match="No such file"):
        networks.build_trained(lambda: DetectorNet(12), "fast", tmp_path / "none")


def test_given_cells_in_bf16_when_decoded_then_boxes_are_as_exact_as_in_float32():
    cells = torch.randn(1, 9, 32, 56, generator=torch.Generator().manual_seed(1)).bfloat16()
    image, found = images()["black"], []
    for dtype in (torch.float32, torch.bfloat16):
        net = detector().to(dtype)
        net.cells = lambda _, dtype=dtype: cells.to(dtype)
        found.append(net(image.to(dtype)))
    assert torch.equal(*found)


def test_given_rows_that_are_masked_out_when_planning_then_even_nan_in_them_is_not_read():
    network = planner()
    history = torch.rand((1, HISTORY_FRAMES, FRAME_FEATURES), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(HISTORY_FRAMES).unsqueeze(0) >= 6
    ego = torch.tensor([[10.0, 0.1]])
    poisoned = history.masked_fill(~mask.unsqueeze(2), NAN)
    assert torch.equal(network(history, mask, ego), network(poisoned, mask, ego))
    assert not torch.equal(network(history, mask, ego), network(history, torch.ones_like(mask), ego))


@pytest.mark.parametrize(
    ("speed", "yaw_rate"), [(-3.0, 0.5), (0.0, 0.0), (0.1, -0.5), (8.0, 0.0), (40.0, 0.5)]
)
def test_given_any_motion_when_planning_then_accelerations_stay_within_bounds(speed, yaw_rate):
    network = planner()
    history = (
        torch.randn((1, HISTORY_FRAMES, FRAME_FEATURES), generator=torch.Generator().manual_seed(1)) * 5
    )
    mask = torch.ones((1, HISTORY_FRAMES), dtype=torch.bool)
    ego = torch.tensor([[speed, yaw_rate]])
    coarse, finer, finest = network.steps(history, mask, ego)
    assert torch.equal(finest, network(history, mask, ego))
    assert speed == 0 or not torch.equal(coarse, finer)
    for plan in (coarse, finer, finest):
        _check(plan, speed, yaw_rate)


def _check(plan, speed, yaw_rate):
    x, y, heading, speeds = plan.double()[0].T
    assert len(x) == WAYPOINTS
    before = torch.cat((torch.tensor([speed], dtype=torch.float64), speeds[:-1]))
    gained = (speeds - before) * math.copysign(1.0, speed) / 0.1
    assert -6.0 - 1e-3 <= gained.min() <= gained.max() <= 1.5 + 1e-3
    assert (speeds * speed >= 0).all()
    yaw_rates = torch.diff(heading, prepend=torch.zeros(1)) / 0.1
    middle = 0.5 * (speeds + before).abs()
    kept = yaw_rate * (middle / max(abs(speed), 1e-3)).clamp(max=1.0)
    assert ((yaw_rates - kept).abs() * middle).max() <= 1.5 + 1e-2
    steps = torch.hypot(torch.diff(x, prepend=torch.zeros(1)), torch.diff(y, prepend=torch.zeros(1)))
    assert torch.allclose(steps, 0.05 * (speeds + before).abs(), atol=1e-4)


def test_given_no_correction_when_rolled_out_then_the_path_is_the_circle_of_speed_and_yaw_rate():
    speed, yaw_rate = 10.0, 0.2
    points = roll_out(torch.tensor([[speed, yaw_rate]]), torch.zeros(1, WAYPOINTS, networks.EGO_FIELDS))[0]
    for index, (x, y, heading, _) in enumerate(points.tolist(), start=1):
        turned = yaw_rate * index * 0.1
        assert math.isclose(heading, turned, abs_tol=1e-5)
        assert math.isclose(x, speed / yaw_rate * math.sin(turned), abs_tol=2e-3)
        assert math.isclose(y, speed / yaw_rate * (1 - math.cos(turned)), abs_tol=2e-3)


def test_given_a_fast_vehicle_when_corrected_with_all_force_then_it_brakes_by_6_and_accelerates_by_1_5():
    correction = torch.zeros(2, WAYPOINTS, networks.EGO_FIELDS)
    correction[0, :, 0], correction[1, :, 0] = -1.0, 1.0
    braked, accelerated = roll_out(torch.tensor([[30.0, 0.0], [30.0, 0.0]]), correction)[:, -1, 3].tolist()
    assert (braked, accelerated) == (pytest.approx(30.0 - 6.0 * 3.0), pytest.approx(30.0 + 1.5 * 3.0))


def test_given_objects_in_another_order_or_empty_places_when_planning_then_the_plan_is_the_same():
    network, random = planner(), torch.Generator().manual_seed(1)
    mask, ego = torch.ones((1, HISTORY_FRAMES), dtype=torch.bool), torch.tensor([[10.0, 0.1]])
    history = torch.rand((1, HISTORY_FRAMES, FRAME_FEATURES), generator=random)
    objects = history[:, :, : NEAREST * OBJECT_FIELDS].view(1, HISTORY_FRAMES, NEAREST, OBJECT_FIELDS)
    plan = network(history, mask, ego)
    objects[:, :, -2:] = objects[:, :, :2]  # twice the same object is one object
    one = network(history, mask, ego)
    objects[:, :, -2:] = 0.0
    torch.testing.assert_close(network(history, mask, ego), one)
    objects.copy_(objects.flip(2))
    torch.testing.assert_close(network(history, mask, ego), one)
    assert not torch.allclose(plan, one)


def test_given_a_slow_vehicle_when_braked_with_all_force_then_it_stops_and_does_not_turn_back():
    speed = roll_out(torch.tensor([[1.0, 0.0]]), -torch.ones(1, WAYPOINTS, networks.EGO_FIELDS))[0, :, 3]
    assert (speed >= 0).all()
    assert speed[-1] == 0


def test_given_a_bend_when_braked_to_a_standstill_then_the_bend_stays_and_the_heading_with_it():
    correction = torch.zeros(1, WAYPOINTS, networks.EGO_FIELDS)
    correction[:, :, 0] = -1.0
    x, y, heading, speed = roll_out(torch.tensor([[6.0, 0.3]]), correction)[0].double().T
    way = torch.hypot(torch.diff(x), torch.diff(y))
    assert speed[11:].abs().max() == 0
    assert torch.equal(heading[11:], heading[11:12].expand(19))
    assert (torch.diff(heading)[:9] / way[:9]).tolist() == pytest.approx([0.05] * 9, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_given_a_gpu_when_detecting_there_then_the_answers_agree_with_the_cpu():
    image, gpu = images()["blobs"], torch.device("cuda", 0)
    with matrix_precision("fp32", gpu):  # as in a worker
        here, there = detector()(image), detector().to(gpu)(image.to(gpu)).cpu()
    torch.testing.assert_close(there[..., 1:], here[..., 1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["detector", "planner", "lidar"])
def test_given_the_weights_that_ship_when_hashed_then_figures_and_card_are_theirs(name):
    path = networks.DETECTOR_WEIGHTS.with_name(f"{name}.safetensors")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["sha256"] == found
    assert found in path.with_suffix(".md").read_text(encoding="utf-8")
    assert networks.width_in(path, "fast", 0) > 0
    assert networks.width_in(path, "huge", 7) == 7
