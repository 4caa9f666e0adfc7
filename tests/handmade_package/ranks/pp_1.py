"""Ranks at pp=1: stage 1."""

MESH = "pp=2,dp=2,tp=2"
STAGES = (1,)
GROUPS = ("pp", "dp", "tp")  # axes: one group for all ranks that differ only along them
LINKS = {(0, 1): 0, (1, 0): 0}  # (from stage, to stage) -> the other rank's pp
SCHEDULE = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
