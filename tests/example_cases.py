"""Calls of the operations that treat examples alike: the first dimension of what they read is the batch."""

from __future__ import annotations

import torch

from tests.op_cases import Case, case, normal, whole


def example_cases() -> list[Case]:
    """One call or more for every operation with a rule from rules/examples.py."""
    x, image = normal(6, 4, 6), normal(6, 4, 2, 3)
    indices = whole(6, 6, 4, 3)
    weights = [normal(8, 6), normal(8, 2), normal(8), normal(8)]
    gates = [normal(6, 6), normal(6, 2), normal(6), normal(6)]
    plain = [normal(2, 6), normal(2, 2), normal(2), normal(2)]
    state, cell = normal(1, 6, 2), normal(1, 6, 2)
    time_first = normal(4, 6, 6)
    found = [
        case("conv_transpose1d", x, normal(4, 3, 2)),
        case("conv_transpose2d", image, normal(4, 3, 2, 2)),
        case("conv_transpose3d", normal(6, 2, 2, 2, 2), normal(2, 3, 2, 2, 2)),
        case("pixel_shuffle", image, 2),
        case("pixel_unshuffle", normal(6, 2, 4, 4), 2),
        case("im2col", image, [2, 2], [1, 1], [0, 0], [1, 1]),
        case("col2im", normal(6, 16, 2), [2, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
        case("prelu", x, normal(4)),
        case("upsample_nearest1d", x, [12]),
        case("upsample_linear1d", x, [12], False),
        case("upsample_nearest3d", normal(6, 2, 2, 2, 2), [4, 4, 4]),
        case("_upsample_nearest_exact1d", x, [12]),
        case("_upsample_nearest_exact3d", normal(6, 2, 2, 2, 2), [4, 4, 4]),
        case("upsample_trilinear3d", normal(6, 2, 2, 2, 2), [4, 4, 4], False),
        case("cdist", x, normal(6, 5, 6)),
        case("pairwise_distance", normal(6, 4), normal(6, 4)),
        case("bilinear", normal(6, 4), normal(6, 3), normal(5, 4, 3), None),
        case("cosine_similarity", x, normal(6, 4, 6), 2),
        case("unfold", x, 2, 2, 1),
        case("diagonal", x, 0, 1, 2),
        case("diagonal_scatter", x, normal(6, 4), 0, 1, 2),
        case("diag_embed", x),
        case("var_mean", x, [2]),
        case("std_mean", x, [1]),
        case("scatter", x, 2, indices, normal(6, 4, 3)),
        case("scatter_add", x, 2, indices, normal(6, 4, 3)),
        case("scatter_add", normal(4), 0, torch.tensor([0, 2, 2, 1, 0, 3]), normal(6)),
        case("scatter_add", normal(3, 5), 0, torch.randint(3, (4, 2)), normal(4, 2)),
        case("histc", torch.tensor([[0.0, 2, 2], [1, 0, 3]]), 4, 0, 3),
        case("scatter_reduce", x, 2, indices, normal(6, 4, 3), "sum"),
        case("index_add", x, 2, torch.tensor([0, 2, 2]), normal(6, 4, 3)),
        case("index_copy", x, 2, torch.tensor([0, 2, 1]), normal(6, 4, 3)),
    ]
    for first, given in ((True, x), (False, time_first)):
        flags = (True, 1, 0.0, False, False, first)
        found += [
            case("lstm", given, [state, cell], weights, *flags),
            case("gru", given, state, gates, *flags),
            case("rnn_tanh", given, state, plain, *flags),
            case("rnn_relu", given, state, plain, *flags),
        ]
    return found
