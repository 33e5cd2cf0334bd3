"""Two runs against each other, and a verdict for each metric."""
