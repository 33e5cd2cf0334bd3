"""Why outputs are old: where the time between stamp and actuation goes, and what to change."""
