"""Rank 1 of 8."""

RANK = 1
COORDINATE = {"pp": 0, "dp": 0, "tp": 1}
STAGES = (0,)
GROUPS = {"pp": (1, 5), "dp": (1, 3), "tp": (0, 1)}
LINKS = {(0, 1): 5, (1, 0): 5}  # (from stage, to stage) -> the other rank
SCHEDULE = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
