"""Rank 3 of 4: stage 0."""

RANK = 3
COORDINATE = {"pp": 0, "dp": 1, "tp": 1}
STAGES = (0,)
GROUPS = {
    "dp": (1, 3),
    "tp": (2, 3),
}
LINKS: dict[tuple[int, int], int] = {}

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "embed.weight": "[192:256, :]",
    "blocks.*.norm1.weight": "[32:64]",
    "blocks.*.attn.wq.weight": "[48:64, :]",
    "blocks.*.attn.wk.weight": "[24:32, :]",
    "blocks.*.attn.wv.weight": "[24:32, :]",
    "blocks.*.attn.wo.weight": "[32:64, 32:64]",
    "blocks.*.norm2.weight": "[32:64]",
    "blocks.*.mlp.gate.weight": "[132:176, :]",
    "blocks.*.mlp.up.weight": "[132:176, :]",
    "blocks.*.mlp.down.weight": "[32:64, 88:176]",
    "norm.weight": "[32:64]",
    "head.weight": "[192:256, :]",
}

SCHEDULE = "0UNSHARD>0F 0F0>0B 0B0 0REDUCE_GRAD"
