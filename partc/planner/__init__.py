"""The planner: finds the mesh and the options that train a model fastest on a cluster, and explains why."""
