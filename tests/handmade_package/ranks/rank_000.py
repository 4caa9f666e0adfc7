"""Rank 0 of 8."""

RANK = 0
COORDINATE = {"pp": 0, "dp": 0, "tp": 0}
STAGE = 0
GROUPS = {"dp": (0, 2), "tp": (0, 1)}
PEERS = {1: 4}  # stage -> the rank that sends to and receives from this one
SCHEDULE = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
