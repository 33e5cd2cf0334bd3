from hypothesis import HealthCheck, settings

# others use this machine as well: how long an example takes says nothing
settings.register_profile("shared_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared_machine")
