"""Signals, the detector, rules, alerts and their grouping."""
