"""Rank 5 of 8: stage 1."""

RANK = 5
COORDINATE = {"pp": 1, "dp": 0, "tp": 1}
STAGES = (1,)
GROUPS = {
    "pp": (1, 5),
    "dp": (5, 7),
    "tp": (4, 5),
    "dp,tp": (4, 5, 6, 7),
}
LINKS = {(0, 1): 1, (1, 0): 1}  # (from stage, to stage) -> the other rank

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "blocks.*.attn.wq.weight": "[32:64, :]",
    "blocks.*.attn.wk.weight": "[16:32, :]",
    "blocks.*.attn.wv.weight": "[16:32, :]",
    "blocks.*.attn.wo.weight": "[:, 32:64]",
    "blocks.*.mlp.gate.weight": "[88:176, :]",
    "blocks.*.mlp.up.weight": "[88:176, :]",
    "blocks.*.mlp.down.weight": "[:, 88:176]",
    "head.weight": "[128:256, :]",
}

SCHEDULE = (
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1RECV_F3 1B2 1SEND_B2 1F3 1B3 "
    "1SEND_B3 1REDUCE_GRAD"
)
