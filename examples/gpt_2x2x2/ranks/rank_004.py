"""Rank 4 of 8: stage 1."""

RANK = 4
COORDINATE = {"pp": 1, "dp": 0, "tp": 0}
STAGES = (1,)
GROUPS = {
    "pp": (0, 4),
    "dp": (4, 6),
    "tp": (4, 5),
    "dp,tp": (4, 5, 6, 7),
}
LINKS = {(0, 1): 0, (1, 0): 0}  # (from stage, to stage) -> the other rank

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "blocks.*.attn.wq.weight": "[0:32, :]",
    "blocks.*.attn.wk.weight": "[0:16, :]",
    "blocks.*.attn.wv.weight": "[0:16, :]",
    "blocks.*.attn.wo.weight": "[:, 0:32]",
    "blocks.*.mlp.gate.weight": "[0:88, :]",
    "blocks.*.mlp.up.weight": "[0:88, :]",
    "blocks.*.mlp.down.weight": "[:, 0:88]",
    "head.weight": "[0:128, :]",
}

SCHEDULE = (
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1RECV_F3 1B2 1SEND_B2 1F3 1B3 "
    "1SEND_B3 1REDUCE_GRAD"
)
