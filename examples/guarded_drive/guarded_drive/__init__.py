"""A model of a user's own."""
