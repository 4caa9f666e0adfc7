"""All ranks: stage 0."""

MESH = "pp=1,dp=2,tp=2"
STAGES = (0,)
GROUPS = ("dp", "tp")  # of ranks that differ along these axes only
LINKS: dict[tuple[int, int], int] = {}

SCHEDULE = "0UNSHARD>0F 0F0>0B 0B0 0REDUCE_GRAD"
