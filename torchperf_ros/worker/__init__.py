"""Inside a worker process: the session, the tier that runs, captures. Imports torch."""
