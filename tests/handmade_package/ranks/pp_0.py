"""Ranks at pp=0: stage 0."""

MESH = "pp=2,dp=2,tp=2"
STAGES = (0,)
GROUPS = ("pp", "dp", "tp")  # axes: one group for all ranks that differ only along them
LINKS = {(0, 1): 1, (1, 0): 1}  # (from stage, to stage) -> the other rank's pp
SCHEDULE = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
