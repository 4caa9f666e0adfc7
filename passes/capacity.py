"""Bound the rows of each expert: with `--expert-capacity`, the results of later rows are zero.

    matmul_…      = expert_matmul(…, experts, …up)            # f32[128, 24]
    silu_…        = silu(matmul_…)
    matmul_1_…    = expert_matmul(silu_…, experts, …down)     # f32[128, 16]
  ->
    chosen        = reshape(experts, (8, 16))                 # i64[8, 16]
    places        = expert_places(chosen)                     # i64[8, 16]
    kept          = lt(places, 5)                             # bool[8, 16]
    kept_2        = reshape(kept, (128,))                     # bool[128]
    none          = full((), 4)                               # i64[]
    experts_taken = where(kept_2, experts, none)              # i64[128]
    matmul_…      = expert_matmul(…, experts_taken, …up)      # f32[128, 24]
    silu_…        = silu(matmul_…)
    matmul_1_…all = expert_matmul(silu_…, experts_taken, …down)
    kept_3        = reshape(kept_2, (128, 1))                 # bool[128, 1]
    nothing       = full((), 0)                               # f32[]
    matmul_1_…    = where(kept_3, matmul_1_…all, nothing)     # f32[128, 16]

The number 4 belongs to no expert: such rows are not computed, and do not travel.

An expert takes its first rows of each scope, in the order of tokens and of their choices. The scope is a sequence or a
microbatch, which no mesh changes: where ranks hold parts of it, they gather the choices. A rank is not a scope, as the
rows that it drops would depend on the mesh.
"""

from __future__ import annotations

import math
from dataclasses import replace

from partc import fuel
from partc.errors import PartcError
from partc.ir.capacity import SCOPES, Capacity
from partc.ir.expert_products import ExpertMatmul
from partc.ir.naming import unique
from partc.ir.program import Op, Program, Ref, Region
from partc.passes.route.rows import RowWriter


def capacity(
    program: Program, *, expert_capacity: Capacity | None = None, expert_axes: tuple[str, ...] = ()
) -> Program:
    """Bound the rows of all experts that tokens choose. Raises PartcError P0109."""
    found = expert_capacity
    if found is None:
        return program
    apart = program.microbatches > 1 and not program.separate_batches
    if found.scope == "microbatch" and apart:
        raise PartcError(
            "P0109",
            f"--expert-capacity {found} counts rows of a microbatch, and {program.microbatches} microbatches of this "
            "model are computed as parts of one batch",
            help=f"count rows by sequence: --expert-capacity {found.factor:g}, or give --microbatches 1",
        )
    batch = program.value_types()[program.batch_entries[0]].shape[0]
    regions = tuple(_bounded(region, found, batch, travel=bool(expert_axes)) for region in program.regions)
    if regions == program.regions:
        raise PartcError(
            "P0109",
            "--expert-capacity has no rows to bound: the model has no products of rows with chosen experts' matrices",
            help="leave the option out",
        )
    return replace(program, regions=regions)


def _bounded(region: Region, found: Capacity, batch: int, *, travel: bool) -> Region:
    """Bound the rows of a region's experts. If rows `travel`, lookups by expert leave out dropped rows too."""
    graph, types = region.forward, dict(region.types(region.forward))
    last = {product.chosen: op for op in graph.ops if (product := ExpertMatmul.of(op))}
    ends = {_with_bias(op, graph.ops, chosen): chosen for chosen, op in last.items()}
    w = RowWriter(types=types, taken=set(types))
    kept: dict[str, str] = {}  # choice of experts -> mask of the rows that are kept
    taken: dict[str, str] = {}  # choice of experts -> the same with an unused number for dropped rows
    for op in graph.ops:
        product = ExpertMatmul.of(op)
        if product and product.chosen not in kept and fuel.may_rewrite("capacity", op.source):
            w.source, chosen, experts = op.source, product.chosen, w.shape(product.weights)[0]
            kept[chosen] = _within_capacity(w, found, batch, chosen, experts)
            none = w.add("full", ((), experts), (), w.types[chosen].dtype, "none")
            args = (Ref(kept[chosen]), Ref(chosen), Ref(none))
            taken[chosen] = w.add("where", args, w.shape(chosen), w.types[chosen].dtype, f"{chosen}_taken")
        if product or (travel and op.name == "index"):
            op = op.with_operands(taken)
        bounded = ends.get(op.result.name) if len(op.results) == 1 else None
        if bounded not in kept:
            w.keep(op)
            continue
        w.source = op.source
        made = op.result
        every = replace(made, name=unique(f"{made.name}_all", w.taken))
        w.keep(replace(op, results=(every,)))
        column = w.reshape(kept[bounded], (made.type.shape[0], 1), "kept")
        zero = w.add("full", ((), 0), (), made.type.dtype, "nothing")
        w.define("where", (Ref(column), Ref(every.name), Ref(zero)), made.type.shape, made.type.dtype, made.name)
    return replace(region, forward=replace(graph, ops=tuple(w.ops)))


def _within_capacity(w: RowWriter, found: Capacity, batch: int, chosen: str, experts: int) -> str:
    """The rows within the capacity of their expert, bool[rows]. Raises PartcError P0109."""
    (count,) = w.shape(chosen)
    scopes = batch if found.scope == SCOPES[0] else 1
    if count % scopes:
        raise PartcError(
            "P0109",
            f"--expert-capacity {found}: {count} rows of experts do not divide into {scopes} sequences",
            help="leave the option out",
            source=w.source,
        )
    most = math.ceil(found.factor * (count // scopes) / experts)
    apart = w.reshape(chosen, (scopes, count // scopes), "chosen")
    places = w.add("expert_places", (Ref(apart),), w.shape(apart), "i64", "places")
    kept = w.add("lt", (Ref(places), most), w.shape(places), "bool", "kept")
    return w.reshape(kept, (count,), "kept")


def _with_bias(product: Op, ops: tuple[Op, ...], chosen: str) -> str:
    """The result of the last product, or of the addition of each expert's bias to it."""
    lookups = {op.result.name for op in ops if op.name == "index" and [*op.refs()][1:] == [chosen]}
    name = product.result.name
    for op in ops:
        if op.name == "add" and name in op.refs() and not lookups.isdisjoint(op.refs()):
            return op.result.name
    return name
