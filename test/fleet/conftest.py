"""A key, a plan, and a vehicle whose bucket is low."""

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from torchperf_ros.fleet.plan import RolloutPlan, RolloutStep, bucket_percent, new_plan
from torchperf_ros.fleet.records import Block
from torchperf_ros.fleet.signature import make_keys, read_private_key, sign
from torchperf_ros.fleet.vehicle import VehicleRollout

# A candidate stands beside a stage that runs the adapters of the stage's tests.
from ..stage.conftest import (  # noqa: F401
    _adapters_can_be_imported_by_workers,
    settled_soon,
    start_own_stage,
    start_stage,
)

NOW = datetime.datetime(2026, 11, 24, 8, tzinfo=datetime.timezone.utc)
NAME = "detector-7"
EARLY = next(f"car-{n}" for n in range(10_000) if bucket_percent(NAME, f"car-{n}") < 0.9)
LATE = next(f"car-{n}" for n in range(10_000) if bucket_percent(NAME, f"car-{n}") > 60)


def plan_with(**changes) -> RolloutPlan:
    values = {"name": NAME, "stage": "perception", "version": "7", "candidate": {"engine": "eager"}}
    return new_plan(values | changes, NOW)


def serving(**changes) -> RolloutPlan:
    """One step that serves at once, with a probation of a minute."""
    values = {"steps": (RolloutStep(1), RolloutStep(100)), "shadow_min": 0.0, "probation_min": 1.0}
    return replace(plan_with(), **(values | changes))


def minute(role="serving", version="7", t_s=0.0, **figures) -> Block:
    return Block(t_s, "drive 1", version, 1, 0, role, **({"frames": 1800} | figures))


@dataclass
class Desk:
    """Who owns plans, and where vehicles find them."""

    folder: Path
    now: datetime.datetime = NOW

    def __post_init__(self):
        self.public = make_keys(self.folder / "key")
        self.private = read_private_key(self.folder / "key")
        self.plan_path = self.folder / "plan.json"

    def publish(self, plan, key=None):
        self.plan_path.write_text(sign(plan, key or self.private))
        return plan

    def vehicle(self, name=EARLY, **facts):
        return VehicleRollout(
            self.folder / name,
            {"vehicle": name, **facts},
            self.public,
            self.plan_path,
            "perception",
            lambda: self.now,
        )


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)
