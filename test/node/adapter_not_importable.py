"""An adapter's module that fails while it is imported."""

msg = "the camera's driver is not installed"
raise ImportError(msg)
