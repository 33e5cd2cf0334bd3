"""What users derive from and call, and the words that every room shares: errors, clock, outcomes, messages."""
