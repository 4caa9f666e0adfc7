"""Rank 3 of 8: stage 0."""

RANK = 3
COORDINATE = {"pp": 0, "dp": 1, "tp": 1}
STAGES = (0,)
GROUPS = {
    "pp": (3, 7),
    "dp": (1, 3),
    "tp": (2, 3),
    "dp,tp": (0, 1, 2, 3),
}
LINKS = {(0, 1): 7, (1, 0): 7}  # (from stage, to stage) -> the other rank

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "embed.weight": "[128:256, :]",
    "blocks.*.attn.wq.weight": "[32:64, :]",
    "blocks.*.attn.wk.weight": "[16:32, :]",
    "blocks.*.attn.wv.weight": "[16:32, :]",
    "blocks.*.attn.wo.weight": "[:, 32:64]",
    "blocks.*.mlp.gate.weight": "[88:176, :]",
    "blocks.*.mlp.up.weight": "[88:176, :]",
    "blocks.*.mlp.down.weight": "[:, 88:176]",
}

SCHEDULE = (
    "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0F3 0SEND_F3 0RECV_B3 0B2 "
    "0B3 0REDUCE_GRAD"
)
