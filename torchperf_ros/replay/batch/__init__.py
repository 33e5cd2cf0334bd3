"""Many logs side by side on a Dask cluster."""
