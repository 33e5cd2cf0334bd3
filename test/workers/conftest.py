# Pools run the adapters of the stage's tests.
from ..stage.conftest import _adapters_can_be_imported_by_workers, start_own_stage, start_stage  # noqa: F401
