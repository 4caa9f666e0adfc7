"""Rules against DTensor's sharding propagation: from our operands' placements it must derive our results' placements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TheirPartial
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard
from torch.distributed.tensor.debug import CommDebugMode

from partc.ir.layout import Partial, Placement, Shard
from partc.rules import choices, placements
from tests import op_cases
from tests.op_cases import Case
from tests.rules.test_rules import CASES, CUTS, by_position, rule_of, spread_layouts
from tests.virtual_ops import shard

N = 2
# Operations of which DTensor moves data first in cases that our rules compute in place, and why.
# Execution (test_rules) stands behind ours.
ITS_LIMITS = {
    **dict.fromkeys(op_cases.MATRIX_FUNCTIONS, "gathers batches of matrices"),
    "linalg_solve_triangular": "gathers batches of matrices",
    "mask_classes": "cuts no slice along what is cut",
    "clone": "sums parts first",
    "where": "sums parts first",
    "masked_fill": "sums parts first",
    "cumsum": "sums parts first",
    "gather": "sums parts first",
    "scatter_add": "gathers what is added up",
    "repeat_interleave": "sums parts first",
    "dot": "sums parts first",
    "einsum": "sums parts first",
    "matmul": "reaches some products by way of views that gather, and sums parts of vectors first",
    "tril": "replicates",
    "triu": "replicates",
    "cat": "gathers along the joined dimension",
    "slice_scatter": "sums parts first",
    "slice": "gathers for steps",
    "repeat": "gathers for strided results",
    "reshape": "gathers where leading parts are shared but dimensions don't nest",
}
# Left out: it replicates all but the batch of a convolution, a mask of ours isn't a DTensor, and it has no
# strategy for the others, or gathers.
UNKNOWN = (
    *("linear_cross_entropy", "linear_cross_entropy_backward", "linear_cross_entropy_grad_input"),
    *("incoming_gradient", "own_gradient"),
    "times_loss_scale",
    *("attention", "attention_backward", "conv1d", "conv2d", "conv3d"),
    *("scatter_reduce", "cdist", "bilinear", "gru", "unfold", "diagonal", "diagonal_scatter", "diag_embed", "rnn_tanh"),
    *("im2col", "col2im", "rnn_relu", "expert_places", "selected_places", "bag_sum", "bag_max", "bag_sum_grad"),
    "linear_sum_assignment",
    "bag_max_grad",
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        pytest.skip("this process already is in a process group")
    dist.init_process_group("fake", rank=0, world_size=N, store=FakeStore())
    yield init_device_mesh("cpu", (N,))
    dist.destroy_process_group()


def theirs(placement: Placement) -> TheirShard | TheirReplicate | TheirPartial:
    if isinstance(placement, Shard):
        return TheirShard(placement.dim)
    return TheirPartial() if isinstance(placement, Partial) else TheirReplicate()


def same(found: object, ours: Placement) -> bool:
    """A strided cut is a `_StridedShard` with our `outer` as its split factor; a masked sum is a sum."""
    if isinstance(ours, Shard):
        dim, factor = getattr(found, "dim", None), getattr(found, "split_factor", 1)
        return (dim, factor) == (ours.dim, ours.outer)
    return isinstance(found, TheirPartial if isinstance(ours, Partial) else TheirReplicate)


@pytest.mark.parametrize("case", [c for c in CASES if c.values and c.op.name not in UNKNOWN], ids=str)
def test_results_are_placed_alike(case: Case, mesh: DeviceMesh) -> None:
    rule = rule_of(case)
    op = by_position(case.op)
    compared = 0
    for choice in choices(case.op, rule, "a", N, {factor.name: CUTS for factor in rule.factors}):
        asked, made = placements(case.op, rule, choice)
        strided = any(isinstance(placement, Shard) and placement.outer > 1 for placement in asked)
        free = choice.factor is not None and not any(isinstance(placement, Shard | Partial) for placement in asked)
        if strided or free or choice.factor in rule.combined:
            continue  # it takes no strided operands, cuts no result of whole operands, has no sharded loss here
        layouts = spread_layouts(case, rule, [choice], {"a": N})
        assert layouts is not None
        values = {}
        for index, (name, placement, layout) in enumerate(zip(case.op.refs(), asked, layouts[0], strict=True)):
            local = shard(case.values[name], layout, {"a": N})[0,]
            values[str(index)] = DTensor.from_local(local, mesh, [theirs(placement)], run_check=False)
        with CommDebugMode() as communication:
            results = op_cases.run(op, values)
        if op.name in ITS_LIMITS and communication.get_total_counts():
            continue
        assert communication.get_total_counts() == 0, f"{choice}: it moves data"
        for result, ours in zip(results, made, strict=True):
            assert isinstance(result, DTensor)
            assert same(result.placements[0], ours), f"{choice}: {result.placements[0]} where the rule makes {ours}"
        compared += 1
    assert compared
