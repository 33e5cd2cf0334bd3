"""Compiled packages on disk: what they are built from, where they lie, who builds them."""
