"""Rank 6 of 8."""

RANK = 6
COORDINATE = {"pp": 1, "dp": 1, "tp": 0}
STAGES = (1,)
GROUPS = {"pp": (2, 6), "dp": (4, 6), "tp": (6, 7)}
LINKS = {(0, 1): 2, (1, 0): 2}  # (from stage, to stage) -> the other rank
SCHEDULE = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
