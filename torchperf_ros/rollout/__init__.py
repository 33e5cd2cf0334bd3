"""New versions onto vehicles: beside the one that serves, compared, by stages, and back by themselves."""
