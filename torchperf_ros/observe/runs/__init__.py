"""The table of a run: read from logs, records and files."""
