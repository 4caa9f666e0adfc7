"""Rank 0 of 4: stage 0."""

RANK = 0
COORDINATE = {"pp": 0, "dp": 0, "tp": 0}
STAGES = (0,)
GROUPS = {
    "dp": (0, 2),
    "tp": (0, 1),
}
LINKS: dict[tuple[int, int], int] = {}

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "embed.weight": "[0:64, :]",
    "blocks.*.norm1.weight": "[0:32]",
    "blocks.*.attn.wq.weight": "[0:16, :]",
    "blocks.*.attn.wk.weight": "[0:8, :]",
    "blocks.*.attn.wv.weight": "[0:8, :]",
    "blocks.*.attn.wo.weight": "[0:32, 0:32]",
    "blocks.*.norm2.weight": "[0:32]",
    "blocks.*.mlp.gate.weight": "[0:44, :]",
    "blocks.*.mlp.up.weight": "[0:44, :]",
    "blocks.*.mlp.down.weight": "[0:32, 0:88]",
    "norm.weight": "[0:32]",
    "head.weight": "[0:64, :]",
}

SCHEDULE = "0UNSHARD>0F 0F0>0B 0B0 0REDUCE_GRAD"
