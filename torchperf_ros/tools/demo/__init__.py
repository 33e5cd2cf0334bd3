"""A real drive on this machine: player, node, sabotage and a live view."""
