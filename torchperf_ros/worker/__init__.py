"""The names under which adapters of users import what they need; it lives in `model/`."""
