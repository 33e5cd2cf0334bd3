"""Rules that make driving safer: which scene it is, and what follows from an alert."""
