"""Worker processes seen from the node: pool, process, ring, protocol, rolling update, capture."""
