"""Derive every region's backward graph from its local forward graph.

    region head phase microbatch:          region head phase microbatch:
      forward:                               forward:
        head = linear(x, head.weight)          head = linear(x, head.weight)
        …                                      …
        return loss                    ->      return loss
                                             saved count, head, labels, nll_lse, x
                                             backward:
                                               input grad_loss: f32[]
                                               …
                                               grad_x           = linear_grad_input(grad_head, head.weight)
                                               grad_head.weight = linear_grad_weight(grad_head, x)
                                               return grad_x, grad_head.weight

The local forward, collectives included, and torch's autograd run once on fake tensors, and are recorded as they run.
Where a derivative works in place, they are traced by AOT autograd, which makes it functional and takes several times as
long. Every value has its name in the traced graph, and so has its gradient: both graphs keep the model's own names and
layouts. Values that the backward graph reads and that do not depend on an incoming gradient are saved, unless a view or
a constant recreates them at no cost. A buffer that the model changes is saved with its old value. Equal operations of a
graph are merged, such as the gradients of both factors of `x * x`.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from partc.cost.saved_tensors import changed_buffers
from partc.errors import InternalError, PartcError, first_line
from partc.ir import operators
from partc.ir.gradients import gradient_inputs, reached, trainable_params, without_own_gradients
from partc.ir.layout import Layout, Sizes
from partc.ir.mesh import TIME_AXIS
from partc.ir.naming import gradient_name, unique
from partc.ir.operations import shares_memory
from partc.ir.program import (
    SCAN,
    SPARSE,
    Arg,
    Graph,
    Op,
    Program,
    Ref,
    Region,
    TensorType,
    Value,
    without_axes,
)
from partc.ir.scans import scan_of
from partc.passes.differentiate import joint, scans
from partc.passes.differentiate.recorder import Recorder
from partc.rules.inference import reshaped
from partc.rules.kernels import TABLES
from partc.rules.rule import integers
from partc.rules.updates import DEFAULT, refuse_sparse_gradient, updates
from partc.sharding.choices import batch_axes
from partc.torch_private import (
    FakeTensorMode,
    aot_export_joint_simple,
    python_decompositions,
    without_order,
)

# By region without sizes and batch axes: regions with their batch axes, their derivatives, and the sizes of all axes.
Derivatives = MutableMapping[tuple[object, ...], list[tuple[frozenset[str], Region, Region, Sizes]]]
_Named = Callable[[Tensor, str], Tensor]  # gives a tensor and its gradient a name in the traced graph


def differentiate(
    program: Program,
    *,
    optimizer: str = DEFAULT,
    group: Sequence[str] = (),
    forward_only: bool = False,
    derivatives: Derivatives | None = None,
) -> Program:
    """Give a backward graph to every region that a gradient passes through.

    `derivatives` has derivatives of other programs' regions, and receives this program's. One is used for a region that
    differs only in local sizes or lacks some of its batch axes. With `forward_only`, gradients are traced for the form
    of the regions alone, and none is kept as rows.

    Raises PartcError P0422 for a dense gradient whose optimizer needs a sparse one.
    """
    needs = gradient_inputs(program)
    trainable = trainable_params(program)
    changed = changed_buffers(program)
    made = []
    for region in program.regions:
        given = region, needs[region.name], trainable[region.name]
        if derivatives is None:
            found = differentiate_region(*given, program.sizes)
        else:
            found = _known(*given, program.sizes, derivatives)
        made.append(_with_copies(found, changed.get(region.name, frozenset())))
    program = replace(program, regions=tuple(made))
    return program if forward_only else _with_rows(program, optimizer, group)


def _known(
    region: Region, inputs: frozenset[str], params: frozenset[str], sizes: Sizes, derivatives: Derivatives
) -> Region:
    """The region's derivative.

    A known derivative of the same region on a mesh with more batch axes is used without those axes: they only change
    layouts.
    """
    axes = frozenset(batch_axes(sizes))
    blank, ones = _sizeless(without_axes(region, {TIME_AXIS} - axes, sizes), sizes)
    known = derivatives.setdefault((without_axes(blank, axes, sizes), ones, inputs, params), [])
    for over, other, derivative, before in known:
        if over >= axes and without_axes(other, over - axes, sizes) == blank:
            return _resized(without_axes(derivative, over - axes, sizes), sizes, derivative, before)
    derivative = differentiate_region(region, inputs, params, sizes)
    known.append((axes, blank, derivative, sizes))
    return derivative


def _resized(region: Region, sizes: Sizes, other: Region, before: Sizes) -> Region:
    """The region with its own local shapes instead of the literals of `other`, which is equal but for local sizes."""

    def op(new: Op, old: Op) -> Op:
        types = zip(old.results, new.results, strict=True)
        shapes: dict[Arg, Arg] = {
            was.type.layout.local_shape(before): now.type.layout.local_shape(sizes) for was, now in types
        }
        return replace(new, args=tuple(shapes.get(arg, arg) if isinstance(arg, tuple) else arg for arg in new.args))

    def graph(new: Graph, old: Graph) -> Graph:
        return replace(new, ops=tuple(map(op, new.ops, old.ops)))

    backward = region.backward
    if backward is not None and other.backward is not None:
        backward = graph(backward, other.backward)
    return replace(region, forward=graph(region.forward, other.forward), backward=backward)


def _sizeless(region: Region, sizes: Sizes) -> tuple[Region, tuple[object, ...]]:
    """A region without its literal local sizes, and its local dimensions of size 1, which broadcast.

    Regions that agree in both have the same derivative but for local sizes.
    """

    def literals(op: Op) -> Op:
        shapes = {value.type.layout.local_shape(sizes) for value in op.results}
        return replace(op, args=tuple(() if isinstance(arg, tuple) and arg in shapes else arg for arg in op.args))

    blank = replace(region, forward=replace(region.forward, ops=tuple(map(literals, region.forward.ops))))
    types = region.types(region.forward)
    shapes = {name: type.layout.local_shape(sizes) for name, type in types.items()}
    ones = tuple((name, dim) for name, shape in shapes.items() for dim, size in enumerate(shape) if size == 1)
    return blank, ones


def _with_rows(program: Program, optimizer: str, group: Sequence[str]) -> Program:
    """Mark the gradients of tables that are kept as rows; tables on several pipeline ranks have dense ones."""
    sparse = {parameter.name for parameter in program.parameters if parameter.sparse and parameter.trainable}
    if not sparse:
        return program
    holders, rules = program.holders(), updates(program, optimizer, group)
    shared = {name for name in sparse if len({program.place(stage) for stage in holders.get(name, ())}) > 1}
    shared |= _neighbours(program, shared)
    for name in sorted(shared & sparse):
        refuse_sparse_gradient(name, rules[name], "several pipeline ranks read it")
    parameters = tuple(replace(item, sparse=item.sparse and item.name not in shared) for item in program.parameters)
    program, sparse = replace(program, parameters=parameters), sparse - shared
    marked: dict[str, dict[str, str]] = {}
    for call in program.calls:
        region = program.region(call.region)
        for value, name in zip(region.params, call.params, strict=True):
            if name in sparse:
                marked.setdefault(region.name, {})[gradient_name(value.name)] = name
    regions = []
    for region in program.regions:
        names = marked.get(region.name, {}).keys() & {*(region.backward.outputs if region.backward else ())}
        if region.backward is None or not names:
            regions.append(region)
            continue
        makers = region.backward.makers()
        for made in names:
            if makers[made].name not in TABLES:
                raise InternalError(f"{makers[made].name} makes the rows of {marked[region.name][made]}")
        ops = tuple(
            replace(op, attrs=(*op.attrs, (SPARSE, True))) if op.results and op.results[0].name in names else op
            for op in region.backward.ops
        )
        regions.append(replace(region, backward=replace(region.backward, ops=ops)))
    return replace(program, regions=tuple(regions))


def _neighbours(program: Program, names: Collection[str]) -> set[str]:
    """The parameters that other calls of a region read in the same place as one of these."""
    places = {(call.region, index) for call in program.calls for index, name in enumerate(call.params) if name in names}
    return {name for call in program.calls for index, name in enumerate(call.params) if (call.region, index) in places}


def differentiate_region(region: Region, inputs: frozenset[str], params: frozenset[str], sizes: Sizes) -> Region:
    """The region with a backward graph for the gradients of these inputs and parameters, if any has one."""
    roots = inputs | params
    live = reached(region.forward, roots)
    if not live.intersection(region.forward.outputs):
        return replace(region, forward=without_own_gradients(region.forward))
    found = joint.split(_trace_joint(region, roots, live, sizes), region, roots, live, sizes)
    return replace(found, backward=found.backward and _one_copy(_plain_sums(found.backward, sizes), region, sizes))


def _plain_sums(graph: Graph, sizes: Sizes) -> Graph:
    """Replace reshape(sum(x, dims, True), shape) by sum(x, dims, False) if the reshape drops the kept dimensions.

    The first form is the traced gradient of a broadcast operand, such as a bias.
    """
    readers = graph.readers()
    plain: dict[str, Op] = {}
    for op in graph.ops:
        (reader, *more) = readers.get(op.results[0].name, ()) or (op,)
        if op.name != "sum" or more or reader.name != "reshape" or op.result.name in graph.outputs:
            continue
        x, dims, kept = (*op.args, (), False)[:3]
        shape = op.result.type.layout.local_shape(sizes)
        summed = {dim % len(shape) for dim in integers(dims)} if shape else set()
        if kept is True and reader.args[1] == tuple(size for dim, size in enumerate(shape) if dim not in summed):
            plain[op.result.name] = replace(op, args=(x, dims, False), results=reader.results)
    dropped = {op.result.name for op in plain.values()}
    ops = (plain.get(op.results[0].name, op) for op in graph.ops if op.results[0].name not in dropped)
    return replace(graph, ops=tuple(ops))


def _one_copy(graph: Graph, region: Region, sizes: Sizes) -> Graph:
    """Replace cat((reshape(a, [b, s, h·d]), …), 2) of a[b, s, h, d] by reshape(cat((a, …), 2), [b, s, …]).

    The gradients of the parts of a joint product end in this way. Each part is a view of a result of attention's
    backward, which a reshape of the part alone may copy.
    """
    makers = graph.makers()
    types = {value.name: value.type for value in region.params} | {
        value.name: value.type for values in (region.forward, graph) for value in values.definitions().values()
    }
    reads = Counter(name for op in graph.ops for name in op.refs()) + Counter(graph.outputs)
    taken = {*types}
    instead: dict[int, tuple[Op, ...]] = {}
    for op in graph.ops:
        parts = [makers.get(name) for name in op.refs()] if op.name == "cat" and not op.attrs else []
        merged = [
            each for each in parts if each is not None and each.name == "reshape" and reads[each.result.name] == 1
        ]
        layout = _joined_heads(op, merged, types, sizes) if merged and len(merged) == len(parts) else None
        if layout is None:
            continue
        whole = Value(name=unique(f"{op.result.name}_heads", taken), type=replace(op.result.type, layout=layout))
        joined = op.result.type.layout.local_shape(sizes)
        heads = tuple(Ref(next(each.refs())) for each in merged)
        instead |= {id(each): () for each in merged}
        instead[id(op)] = (
            replace(op, args=(heads, len(layout.dims) - 2), results=(whole,)),
            Op(name="reshape", args=(Ref(whole.name), joined), results=op.results, source=op.source),
        )
    return replace(graph, ops=tuple(step for op in graph.ops for step in instead.get(id(op), (op,))))


def _joined_heads(op: Op, parts: Sequence[Op], types: Mapping[str, TensorType], sizes: Sizes) -> Layout | None:
    """The layout of cat((a, …), 2), where the reshapes `parts` join the heads of a, …; None for other joins."""
    joined = op.result.type.layout
    shape = joined.local_shape(sizes)
    shapes = [types[next(each.refs())].layout.local_shape(sizes) for each in parts]
    last, size = len(shape) - 1, shapes[0][-1:]
    dim = op.args[1] if len(op.args) > 1 else 0
    fits = all(len(each) == last + 2 and each[:last] == shape[:last] and each[-1:] == size for each in shapes)
    if dim not in (last, -1) or not fits:
        return None
    viewed = reshaped(Layout(joined.dims[last:]), (sum(each[last] for each in shapes), *size), sizes)
    if viewed is None or viewed.doubtful:
        return None
    return replace(joined, dims=(*joined.dims[:last], *viewed.layout.dims))


def _with_copies(region: Region, changed: frozenset[str]) -> Region:
    """Save copies of buffers that forward changes, in this microbatch or later ones: backward reads the old values.

    Views of such a buffer that are saved, or returned to regions that may save them, become views of the copy.
    """
    if not changed:
        return region
    backward = region.backward
    memory, types = {name: name for name in changed}, region.types(region.forward)
    for op in region.forward.ops:
        first = next(op.refs(), "")
        if first in memory and shares_memory(op, types):
            memory.update((value.name, memory[first]) for value in op.results)
    kept = {memory[name] for name in (*region.saved, *region.forward.outputs) if name in memory}
    again = {name for op in backward.ops for name in op.refs()} if backward is not None else set()
    read = again & changed | kept
    taken = {*region.forward.definitions(), *(value.name for value in region.params)}
    taken |= set() if backward is None else {*backward.definitions()}
    before = {name: unique(f"{name}_before", taken) for name in sorted(read)}
    copies = tuple(
        Op(name="clone", args=(Ref(value.name),), results=(replace(value, name=before[value.name]),))
        for value in region.params
        if value.name in before
    )
    forward = region.forward
    saved = tuple(op.result for op in copies if next(op.refs()) in again)
    parts = tuple(op.renamed(before) if op.results and op.results[0].name in memory else op for op in forward.ops)
    return replace(
        region,
        forward=replace(forward, ops=(*copies, *parts), outputs=tuple(before.get(x, x) for x in forward.outputs)),
        saved=(*region.saved, *(value.name for value in saved)),
        backward=backward
        and replace(backward, inputs=(*backward.inputs, *saved), ops=tuple(op.renamed(before) for op in backward.ops)),
    )


def _trace_joint(region: Region, roots: frozenset[str], live: set[str], sizes: Sizes) -> fx.Graph:
    """The joint graph: (inputs, params, gradients of outputs) -> (outputs, gradients)."""
    arguments = (*region.forward.inputs, *region.params)
    split = lambda step, roots, live: joint.split(_trace_joint(step, roots, live, sizes), step, roots, live, sizes)  # noqa: E731
    loops = {op.results[0].name: scans.derivative(op, live, split) for op in region.forward.ops if op.name == SCAN}

    def local_forward(*tensors: Tensor, named: _Named = torch.ops.partc.mark) -> tuple[Tensor, ...]:
        values = dict(zip((value.name for value in arguments), tensors, strict=True))
        for name in values:
            if name in roots:
                values[name] = named(values[name], name)
        later: list[Op] = []  # the operations of the model's own backward passes
        found: set[str] = set()  # their results
        for op in region.forward.ops:
            if op.name == "own_gradient":
                _run_with_gradients(op, later, values, live, sizes, named)
            elif op.name == "incoming_gradient" or not found.isdisjoint(op.refs()):
                later.append(op)
                found.update(value.name for value in op.results)
            elif op.name == SCAN:
                _define(op, scans.run(op, loops[op.results[0].name], values), values, sizes, named)
            else:
                _run(op, values, live, sizes, named)
        return tuple(named(values[name], name) for name in region.forward.outputs)

    types = region.types(region.forward)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [_empty(value.type, sizes, needs=value.name in roots) for value in arguments]
        incoming = [_empty(types[name], sizes, needs=False) for name in region.forward.outputs if name in live]
    with warnings.catch_warnings(record=True) as said, closing(Recorder((*tensors, *incoming))) as recorder:
        warnings.simplefilter("always")  # whatever the user's filters: the warnings name the operation that fails
        try:
            with python_decompositions(), mode, recorder:
                outputs = local_forward(*tensors, named=recorder.named)
                carrying = [x for x, name in zip(outputs, region.forward.outputs, strict=True) if name in live]
                wanted = [x for x in tensors if x.requires_grad]
                with torch.autograd.detect_anomaly(check_nan=False):  # it names the operation that fails
                    found = iter(torch.autograd.grad(carrying, wanted, incoming, allow_unused=True))
            if not recorder.changes_operands:
                return recorder.returns([*outputs, *(next(found) if x.requires_grad else None for x in tensors)])
            with without_order():
                traced: Any = aot_export_joint_simple(local_forward, tuple(tensors), trace_joint=True)
                graph: fx.Graph = traced.graph
                return graph
        except RuntimeError as error:
            raise _refusal(error, [str(warning.message) for warning in said], region.forward) or error from error


def _empty(type: TensorType, sizes: Sizes, *, needs: bool) -> Tensor:
    return torch.empty(type.layout.local_shape(sizes), dtype=operators.DTYPES[type.dtype], requires_grad=needs)


def _refusal(error: RuntimeError, warnings: Sequence[str], graph: Graph) -> PartcError | None:
    """PartcError P0222 at the line of the operation whose derivative torch refuses; None for other errors."""
    if found := re.search(r"derivative for (?:aten::)?(\w+) is not implemented", str(error)):
        op = next((op for op in graph.ops if op.name.rpartition("::")[2] == found[1]), None)
        cause = f"torch has no derivative of {found[1]}, and a gradient must pass through it"
        help = "detach() its operands, or compute it from operations with a derivative"
    elif found := next(filter(None, (re.search(r"Error detected in (\w+?)Backward", text) for text in warnings)), None):
        # Autograd's node of index_reduce is called IndexReduceBackward0.
        op = next((op for op in graph.ops if op.name.replace("_", "") == found[1].lower()), None)
        if op is None:
            return None
        cause = f"torch refuses the derivative of {op.name}: {first_line(error)}"
        help = "take sizes from the operands: a microbatch has fewer rows than the batch"
    else:
        return None
    return PartcError("P0222", cause, help=help, source=op.source if op is not None else None)


def _run(op: Op, values: dict[str, Any], live: set[str], sizes: Sizes, named: _Named) -> None:
    """Run one IR operation on fake tensors and mark what it defines."""
    if op.name == SCAN:  # a loop of the model's own backward pass
        _define(op, scans.run(op, scans.Derivative(forward=scan_of(op)), values), values, sizes, named)
        return
    args, attrs = operators.torch_arguments(op, values)
    _define(op, call_operator(op, args, attrs, live, sizes), values, sizes, named)


def _define(op: Op, results: Any, values: dict[str, Any], sizes: Sizes, named: _Named) -> None:
    """Mark the results of an operation."""
    for value, result in zip(op.results, results if isinstance(results, tuple | list) else (results,), strict=False):
        expected = value.type.layout.local_shape(sizes)
        if tuple(result.shape) != expected:
            raise InternalError(
                f"{op.source}: {value.name} = {op.name}(…) has local shape {tuple(result.shape)},"
                f" its layout says {expected}"
            )
        values[value.name] = named(result, value.name)


def _run_with_gradients(
    op: Op, later: list[Op], values: dict[str, Any], live: set[str], sizes: Sizes, named: _Named
) -> None:
    """Give the operands of a user's function the gradients that the operations in `later` compute."""
    results, operands, gradients = (tuple(ref.name for ref in each) for each in op.args)  # type: ignore[union-attr]
    incoming = {next(each.refs()): each.result for each in later if each.name == "incoming_gradient"}
    known = dict(values)

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(named(x, value.name) for x, value in zip(tensors, op.results, strict=False))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            inside = dict(known)
            for name, grad in zip(results, grads, strict=True):
                if name in incoming:
                    value = incoming[name]
                    inside[value.name] = named(grad.to(operators.DTYPES[value.type.dtype]), value.name)
            for each in later:
                if each.name != "incoming_gradient" and all(name in inside for name in each.refs()):
                    _run(each, inside, live, sizes, named)
            found = (inside[name].to(known[x].dtype) for x, name in zip(operands, gradients, strict=True))
            return (*(None for _ in results), *found)

    made = Given.apply(*(values[name] for name in (*results, *operands)))
    values.update((value.name, x) for value, x in zip(op.results, made, strict=True))


def call_operator(op: Op, args: list[Any], attrs: dict[str, Any], live: set[str], sizes: Sizes) -> Any:
    """Call the operator with its arguments in torch's form."""
    if "axis" in attrs and not op.name.endswith("_shard"):
        return _collective(op.name, args, attrs, sizes)
    match op.name:
        case "cross_entropy":
            return torch.ops.partc.cross_entropy(*args, "")
        case "cross_entropy_shard":
            return torch.ops.partc.cross_entropy(*args, attrs["axis"])
        case "mask_classes" | "mask_classes_shard":
            return torch.ops.partc.mask_classes(*args, attrs.get("axis", ""))
        case "embedding_shard":
            return torch.ops.partc.embedding_shard(*args[:2], args[2] if len(args) > 2 else -1, attrs["axis"])
        case "lstm":  # torch 2.11 gives the states of a trace one dimension too many
            rows, *states = torch.ops.aten.lstm(*args, **attrs)
            return rows, *(
                x if x.shape == old.shape else x.reshape(old.shape) for x, old in zip(states, args[1], strict=True)
            )
        case "matmul" if not (args[1].dim() == 2 or args[0].shape[:-2] == args[1].shape[:-2]):
            return torch.matmul(*args)
    return operators.resolve(op.name)(*args, **attrs)


def _collective(name: str, args: list[Any], attrs: dict[str, Any], sizes: Sizes) -> Any:
    axis = attrs["axis"]
    operator = getattr(torch.ops.partc, name)
    where: tuple[Any, ...] = ()
    if name == "all_to_all":
        where = (attrs["split_dim"], attrs.get("split_outer", 1), attrs["concat_dim"], attrs.get("concat_outer", 1))
    elif "dim" in attrs:
        where = (attrs["dim"], attrs.get("outer", 1))
    return operator(*args, *where, axis, sizes[axis])
