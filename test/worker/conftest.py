# fixtures for these tests, too
from ..engines.conftest import restored_threads, settled_engines  # noqa: F401
from ..stage.conftest import _adapters_can_be_imported_by_workers, start_own_stage  # noqa: F401
