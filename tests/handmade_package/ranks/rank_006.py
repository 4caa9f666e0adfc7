"""Rank 6 of 8."""

RANK = 6
COORDINATE = {"pp": 1, "dp": 1, "tp": 0}
STAGE = 1
GROUPS = {"dp": (4, 6), "tp": (6, 7)}
PEERS = {0: 2}  # stage -> the rank that sends to and receives from this one
SCHEDULE = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
