"""Rank 2 of 8."""

RANK = 2
COORDINATE = {"pp": 0, "dp": 1, "tp": 0}
STAGES = (0,)
GROUPS = {"pp": (2, 6), "dp": (0, 2), "tp": (2, 3)}
LINKS = {(0, 1): 6, (1, 0): 6}  # (from stage, to stage) -> the other rank
SCHEDULE = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
