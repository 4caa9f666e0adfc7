"""Ranks at pp=1: stage 1."""

MESH = "pp=2,dp=2,tp=2"
STAGES = (1,)
GROUPS = ("pp", "dp", "tp", "dp,tp")  # axes: one group for all ranks that differ only along them
LINKS = {(0, 1): 0, (1, 0): 0}  # (from stage, to stage) -> the other rank's pp

SCHEDULE = (
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1RECV_F3 1B2 1SEND_B2 1F3 1B3 "
    "1SEND_B3 1REDUCE_GRAD"
)
