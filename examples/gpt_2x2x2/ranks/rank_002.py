"""Rank 2 of 8: stage 0."""

RANK = 2
COORDINATE = {"pp": 0, "dp": 1, "tp": 0}
STAGES = (0,)
GROUPS = {
    "pp": (2, 6),
    "dp": (0, 2),
    "tp": (2, 3),
    "dp,tp": (0, 1, 2, 3),
}
LINKS = {(0, 1): 6, (1, 0): 6}  # (from stage, to stage) -> the other rank

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "embed.weight": "[0:128, :]",
    "blocks.*.attn.wq.weight": "[0:32, :]",
    "blocks.*.attn.wk.weight": "[0:16, :]",
    "blocks.*.attn.wv.weight": "[0:16, :]",
    "blocks.*.attn.wo.weight": "[:, 0:32]",
    "blocks.*.mlp.gate.weight": "[0:88, :]",
    "blocks.*.mlp.up.weight": "[0:88, :]",
    "blocks.*.mlp.down.weight": "[:, 0:88]",
}

SCHEDULE = (
    "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0F3 0SEND_F3 0RECV_B3 0B2 "
    "0B3 0REDUCE_GRAD"
)
