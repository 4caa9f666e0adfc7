"""All ranks: stage 0."""

MESH = "pp=1,dp=2,tp=2"
STAGES = (0,)
GROUPS = ("dp", "tp")  # axes: one group for all ranks that differ only along them
LINKS: dict[tuple[int, int], int] = {}

SCHEDULE = "0UNSHARD>0F 0F0>0B 0B0 0REDUCE_GRAD"
