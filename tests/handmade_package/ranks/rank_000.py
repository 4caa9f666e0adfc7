"""Rank 0 of 8."""

RANK = 0
COORDINATE = {"pp": 0, "dp": 0, "tp": 0}
STAGES = (0,)
GROUPS = {"pp": (0, 4), "dp": (0, 2), "tp": (0, 1)}
LINKS = {(0, 1): 4, (1, 0): 4}  # (from stage, to stage) -> the other rank
SCHEDULE = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
