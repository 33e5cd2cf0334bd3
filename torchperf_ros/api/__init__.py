"""What users derive from and call, and words of every room: errors, clock, outcomes, messages."""
