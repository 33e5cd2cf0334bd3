"""What looks at the node: telemetry, watch, recorder, runs with report and comparison, top, doctor."""
