"""Rank 5 of 8."""

RANK = 5
COORDINATE = {"pp": 1, "dp": 0, "tp": 1}
STAGES = (1,)
GROUPS = {"pp": (1, 5), "dp": (5, 7), "tp": (4, 5)}
LINKS = {(0, 1): 1, (1, 0): 1}  # (from stage, to stage) -> the other rank
SCHEDULE = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
