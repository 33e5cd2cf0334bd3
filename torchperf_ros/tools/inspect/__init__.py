"""Graph breaks, recompilations and what to write instead."""
