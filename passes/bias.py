"""Move a bias into the product that it is added to, instead of a separate pass over memory.

    matmul = matmul(x, weight)  ->  weight_t = permute(weight, (1, 0))
    add    = add(matmul, bias)      add      = linear(x, weight_t, bias)

Requires that nothing else reads the product, that the weight is a matrix and the bias has one number for each of its
columns, that all have the same dtype, and that each rank adds its own part of the bias. Models whose weights are stored
[in, out], such as GPT-2's, spell their layers this way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from partc import fuel
from partc.ir.layout import Sizes
from partc.ir.naming import unique
from partc.ir.program import Graph, Op, Program, Ref, Region, TensorType, Value


def bias(program: Program) -> Program:
    """Rewrite every such pair in all graphs of all regions."""
    return program.mapped(lambda region, graph: _graph(region, graph, program.sizes))


def _graph(region: Region, graph: Graph, sizes: Sizes) -> Graph:
    types = region.types(graph)
    kept = region.read_outside(graph)
    reads = Counter(name for op in graph.ops for name in op.refs())
    products = {
        op.result.name: op
        for op in graph.ops
        if op.name == "matmul" and reads[op.result.name] == 1 and op.result.name not in kept
    }
    taken = {*types}
    instead: dict[int, tuple[Op, ...]] = {}
    for op in graph.ops:
        pair = _pair(op, products)
        if pair is None or not _fit(pair[0], op, pair[1], types, sizes) or not fuel.may_rewrite("bias", op.source):
            continue
        product, second = pair
        weight = product.args[1]
        assert isinstance(weight, Ref)
        transposed = Value(name=unique(f"{weight.name}_t", taken), type=_transposed(types[weight.name]))
        args = (product.args[0], Ref(transposed.name), second)
        instead[id(product)] = ()
        instead[id(op)] = (
            Op(name="permute", args=(weight, (1, 0)), results=(transposed,), source=product.source),
            Op(name="linear", args=args, results=op.results, source=product.source),
        )
    return replace(graph, ops=tuple(step for op in graph.ops for step in instead.get(id(op), (op,))))


def _pair(op: Op, products: Mapping[str, Op]) -> tuple[Op, Ref] | None:
    """The product that an operation adds to, and the other summand."""
    if op.name != "add" or op.attrs or len(op.args) != 2:
        return None
    for first, second in (op.args, op.args[::-1]):
        if isinstance(first, Ref) and isinstance(second, Ref) and first.name in products:
            return products[first.name], second
    return None


def _fit(product: Op, added: Op, bias: Ref, types: Mapping[str, TensorType], sizes: Sizes) -> bool:
    x, weight = (types[arg.name] for arg in product.args[:2] if isinstance(arg, Ref))
    y, numbers = added.result.type, types[bias.name]
    columns = weight.layout.local_shape(sizes)
    return (
        len(columns) == 2
        and len(x.shape) >= 2
        and numbers.layout.local_shape(sizes) == columns[1:]
        and product.result.type.layout.local_shape(sizes) == y.layout.local_shape(sizes)
        and len({x.dtype, weight.dtype, numbers.dtype, product.result.type.dtype, y.dtype}) == 1
    )


def _transposed(type: TensorType) -> TensorType:
    return replace(type, layout=replace(type.layout, dims=type.layout.dims[::-1]))
