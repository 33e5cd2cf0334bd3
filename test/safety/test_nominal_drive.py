"""Ordinary driving is not refused.

Lane keeping in bends and IDM behind leads, with traffic in the lanes beside.

`TORCHPERF_GUARD_DRIVE_S=2000` drives for so long in each scene.
"""

import os

import pytest

from benchmarks.traffic.detections import EVENTS, SCENES, Detector, check, drive, event
from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.safety.guard import Guard
from torchperf_ros.settings.safety_options import guard_options

DRIVE_S = float(os.environ.get("TORCHPERF_GUARD_DRIVE_S", "10"))
OPTIONS = guard_options({"guard.act": ["all"]})


@pytest.mark.parametrize("scene", SCENES)
def test_given_ordinary_driving_when_checked_then_no_more_than_a_thousandth_is_refused(scene):
    guard = Guard(OPTIONS)
    found = [check(guard, moment, moment.exact) for moment in drive(SCENES[scene], DRIVE_S)]
    refused = [one for one in found if one.verdict is not GuardVerdict.ACCEPT]
    print(f"{scene}: {len(refused)} of {len(found)} refused", [one.reason for one in refused[:3]])
    assert len(refused) <= 0.001 * len(found), refused[0].reason


@pytest.mark.parametrize("scene", SCENES)
def test_given_detections_without_ids_and_velocities_when_they_are_noisy_then_hardly_a_good_plan_is_refused(
    scene,
):
    guard, detector = Guard(OPTIONS), Detector(0.1, missing=0.05)
    drives = drive(SCENES[scene], DRIVE_S, 0.05)
    found = [check(guard, moment, detector.markers(moment)) for moment in drives]
    # first everything is new, and stands
    refused = [one for one in found[5:] if one.verdict is not GuardVerdict.ACCEPT]
    print(f"{scene}: {len(refused)} of {len(found)} refused", [one.reason for one in refused[:3]])
    assert len(refused) <= 0.02 * len(found), refused[0].reason


def test_given_such_detections_at_10_hz_when_all_scenes_are_driven_then_hardly_a_good_plan_is_refused():
    """At 10 Hz a single scene scatters more than its share."""
    refused = count = 0
    for scene in SCENES:
        guard, detector = Guard(OPTIONS), Detector(0.1, missing=0.05)
        found = [check(guard, moment, detector.markers(moment)) for moment in drive(SCENES[scene], DRIVE_S)]
        count += len(found)
        refused += sum(one.verdict is not GuardVerdict.ACCEPT for one in found[5:])
    assert refused <= 0.02 * count


def refused_at(name, seed, markers):
    """The moment from whose plan on an event is seen; None: a plan was refused before."""
    guard = Guard(OPTIONS)
    for number, moment in enumerate(event(name, 0.05, seed)):
        found = check(guard, moment, markers(moment))
        if number >= 40 and found.verdict is not GuardVerdict.ACCEPT:
            return number
        if 5 <= number < 40 and found.verdict is not GuardVerdict.ACCEPT:
            return None
    raise AssertionError(f"{name} {seed}: it was not seen at all")


@pytest.mark.parametrize(("name", "frames"), zip(EVENTS, (4, 8, 14), strict=True))
def test_given_detections_without_ids_and_velocities_when_something_happens_then_it_is_seen_soon(
    name, frames
):
    later = []
    for seed in range(4):
        exact = refused_at(name, seed, lambda moment: moment.exact)
        noisy = refused_at(name, seed, Detector(0.1, missing=0.05, seed=seed).markers)
        if exact is not None and noisy is not None:
            later.append(noisy - exact)
    print(f"{name}: {later} frames later than with velocities")
    assert len(later) >= 3
    assert max(later) <= frames
