"""Rank 1 of 4: stage 0."""

RANK = 1
COORDINATE = {"pp": 0, "dp": 0, "tp": 1}
STAGES = (0,)
GROUPS = {
    "dp": (1, 3),
    "tp": (0, 1),
}
LINKS: dict[tuple[int, int], int] = {}

# Which elements of each sharded parameter this rank holds.
SHARDS = {
    "embed.weight": "[128:192, :]",
    "blocks.*.norm1.weight": "[0:32]",
    "blocks.*.attn.wq.weight": "[32:48, :]",
    "blocks.*.attn.wk.weight": "[16:24, :]",
    "blocks.*.attn.wv.weight": "[16:24, :]",
    "blocks.*.attn.wo.weight": "[0:32, 32:64]",
    "blocks.*.norm2.weight": "[0:32]",
    "blocks.*.mlp.gate.weight": "[88:132, :]",
    "blocks.*.mlp.up.weight": "[88:132, :]",
    "blocks.*.mlp.down.weight": "[0:32, 88:176]",
    "norm.weight": "[0:32]",
    "head.weight": "[128:192, :]",
}

SCHEDULE = "0UNSHARD>0F 0F0>0B 0B0 0REDUCE_GRAD"
