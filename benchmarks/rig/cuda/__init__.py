"""What `bench cuda` measures: its parts, each in a process of its own, and the networks that they run."""
