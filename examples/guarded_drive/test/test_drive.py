"""The drive in which low sun dazzled the camera: it never goes wrong again unnoticed."""

import pytest


@pytest.mark.fieldlog("drive.mcap")
def test_low_sun(replay, golden):
    """Two of 40 images cannot be used; the last box is held meanwhile, and all others are as they were."""
    result = replay(params="config/lead_vehicle.yaml", pace="virtual", step_times="step_times.yaml")

    perception = result.stage("perception")
    assert perception.miss_ratio <= 0.05
    assert perception.p99_ms <= 45.0
    assert perception.outcomes["bad_input"] == 2
    assert perception.fallbacks == {"hold_last": 2}
    golden.check(result)
