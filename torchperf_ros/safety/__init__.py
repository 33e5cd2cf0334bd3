"""The guard of plans: what is checked before a plan leaves the node. numpy only; times are arguments."""
