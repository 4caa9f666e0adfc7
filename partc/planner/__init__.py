"""The planner: which mesh and options spread a model over a cluster best, and why."""
