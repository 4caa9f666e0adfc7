"""Rank 2 of 4: stage 0."""

RANK = 2
COORDINATE = {"pp": 0, "dp": 1, "tp": 0}
STAGES = (0,)
GROUPS = {
    "dp": (0, 2),
    "tp": (2, 3),
}
LINKS: dict[tuple[int, int], int] = {}

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "embed.weight": "[64:128, :]",
    "blocks.*.norm1.weight": "[32:64]",
    "blocks.*.attn.wq.weight": "[16:32, :]",
    "blocks.*.attn.wk.weight": "[8:16, :]",
    "blocks.*.attn.wv.weight": "[8:16, :]",
    "blocks.*.attn.wo.weight": "[32:64, 0:32]",
    "blocks.*.norm2.weight": "[32:64]",
    "blocks.*.mlp.gate.weight": "[44:88, :]",
    "blocks.*.mlp.up.weight": "[44:88, :]",
    "blocks.*.mlp.down.weight": "[32:64, 0:88]",
    "norm.weight": "[32:64]",
    "head.weight": "[64:128, :]",
}

SCHEDULE = "0UNSHARD>0F 0F0>0B 0B0 0REDUCE_GRAD"
