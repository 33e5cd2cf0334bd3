"""Inside a worker: adapter, session, histories, output checks. Imports torch."""
