"""What the node publishes about itself: diagnostics, metrics, memory."""
