"""What the node tells the world beside its topics."""
