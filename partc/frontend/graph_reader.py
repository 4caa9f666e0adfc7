"""From an exported graph to the IR: operations, their names, types and arguments, and the lines that made them."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from partc.errors import InternalError, PartcError, Source, untraced
from partc.frontend.branches.random_branches import RandomBranch
from partc.frontend.branches.value_branches import RANDOM_BRANCH
from partc.frontend.capture import Captured
from partc.frontend.complex_numbers import is_complex, real_operations
from partc.frontend.model_precision import WIDE_MARK
from partc.frontend.node_sources import module_of, source_of
from partc.frontend.repeats.copies import RepeatedOps
from partc.frontend.returned_operands import returned
from partc.frontend.selections.selection_tests import TESTED
from partc.frontend.state.generator_states import KEPT, RETURNED, idle_states
from partc.frontend.strided_views import Windows, windows
from partc.ir.fx_calls import operation
from partc.ir.gradients import reached
from partc.ir.naming import unique, unreserved
from partc.ir.operations import memory_owner
from partc.ir.operators import DTYPE_NAMES
from partc.ir.program import (
    HOOK_PARTS,
    MODULE_MARK,
    NO_GRAD,
    PASSED_BY,
    Arg,
    DTypeArg,
    Graph,
    Op,
    Ref,
    TensorType,
    Value,
    is_change,
    is_in_place,
)
from partc.quoting import identifier
from partc.torch_private import OpOverload

LITERAL = 4096  # elements of a constant that is written down
_IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_NUMBERS = (bool, int, float)  # types of the values of operations on constants
_INLINED = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
_AUTOCAST = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # the types to which products cast fp32, and other types that they take
# Operations whose tensors must share one dtype, which a trace without values does not check.
_PRODUCTS = frozenset({
    "linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "addmv", "addbmm", "baddbmm", "addr",
    "einsum", "tensordot", "bilinear", "cdist", "prelu", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "lstm", "gru", "rnn_tanh", "rnn_relu",
})  # fmt: skip
_VIEWS_OR_COPIES = frozenset({"reshape", "reshape_as", "flatten", "contiguous"})  # by the strides of their operand
_DROPPED = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"})


def tensor_type(tensor: Tensor, name: str) -> TensorType:
    """The type of a dense, replicated tensor; a complex tensor has the type of its pairs.

    Raises PartcError P0209 for other tensors, and P0206 for sizes that depend on values.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise PartcError("P0209", f"{name} is a {kind} tensor", help="use dense tensors")
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if any(isinstance(size, torch.SymInt) for size in shape):
        raise untraced(f"the size of {name} depends on the values of a tensor",
                         help="keep all elements and mask those that do not count")  # fmt: skip
    if tensor.is_complex():
        dtype, shape = dtype.to_real(), (*shape, 2)
    if dtype not in DTYPE_NAMES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise PartcError("P0209", f"{name} is of {tensor.dtype}", help=f"the dtypes of tensors are {dtypes}")
    return TensorType.replicated(DTYPE_NAMES[dtype], shape)


def repeated_part(x: Tensor) -> tuple[Tensor, int] | None:
    """The smallest part of a constant of which it is a repetition along a dimension, and the dimension.

    A constant of at most LITERAL elements is its own part; None if no part is that small.
    """
    if x.numel() <= LITERAL:
        return x, 0
    for dim, size in enumerate(x.shape):
        for times in range(size, x.numel() // LITERAL, -1):
            if size % times == 0 and x.numel() // times <= LITERAL:
                copies = x.unflatten(dim, (times, size // times))
                part = copies.select(dim, 0)
                if copies.equal(part.unsqueeze(dim).expand_as(copies)):
                    return part, dim
    return None


def _sums(equation: str) -> bool:
    """Whether an equation of einsum sums over a dimension. If not, torch multiplies elements, of any two dtypes."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    dims = [letter for letter in operands if letter not in ",."]
    return not {*dims} <= {*result} if arrow else len(dims) > len({*dims})


class GraphReader:
    """Walks an exported graph once and collects operations, inputs and parameters."""

    def __init__(self, captured: Captured, owners: Mapping[str, str]) -> None:
        self._exported = captured.exported
        self._constants = {name: tensor for name, tensor in captured.exported.constants.items()}
        self._entries = tuple(captured.batch)
        self._calls = captured.calls
        self._names: dict[fx.Node, str] = {}
        self._ops: list[Op] = []
        self._idle = idle_states(captured.exported.graph_module.graph)
        self.params: list[Value] = []
        self.inputs: list[Value] = []
        self.branches: list[RandomBranch] = []
        self.states: dict[str, str] = {}  # first name of a parameter -> name of its value
        self._owners = owners
        self._repeated: RepeatedOps | None = None
        self._low = _AUTOCAST.get(captured.precision)
        self._wide = 0  # the number of disabled autocasts, and of complex operations, around the next operations
        self._trained = captured.trained
        self._hooked: set[str] = set()  # values whose gradient is changed by a hook
        nodes = [node for part in captured.exported.graph_module.modules() for node in _nodes(part)]
        self._taken = {node.name for node in nodes}
        made = Counter(node.name for node in nodes if node.op == "call_function")
        self._shared = {name for name, count in made.items() if count > 1}

    def read(self) -> Graph:
        signature = self._exported.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        module = self._exported.graph_module
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = [node for node in places if specs[node.name].kind == InputKind.USER_INPUT]
        taken = {node.name for node in module.graph.nodes if node not in given}
        for node, entry in zip(given, self._entries, strict=True):
            self._names[node] = unique(unreserved(identifier(entry)), taken)
        for node in places:
            self._placeholder(node, specs[node.name])
        self._taken.update(self._names.values())  # batch entries may have the names of copies
        self._repeated = RepeatedOps(self._calls, self._ops, self._taken)
        self._weights = {name: self.states[owner] for name, owner in self._owners.items() if owner in self.states}
        outputs = self._body(module)
        self._repeated.check_leaks()
        return Graph(inputs=tuple(self.inputs), ops=tuple(self._ops), outputs=outputs)

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        self._names.setdefault(node, node.name)
        match spec.kind:
            case InputKind.USER_INPUT:
                type = tensor_type(node.meta["val"], f"the entry {self._entries[len(self.inputs)]!r} of batch()")
                self.inputs.append(Value(name=self._names[node], type=type))
            case InputKind.PARAMETER | InputKind.BUFFER:
                owner = self._owners[spec.target.removeprefix("model.")]
                self._names[node] = self.states.setdefault(owner, node.name)
                if self._names[node] == node.name:  # not an alias of a tied parameter
                    type = tensor_type(node.meta["val"], f"{owner} of the model")
                    self.params.append(Value(name=node.name, type=type))
            case InputKind.CONSTANT_TENSOR:
                self._constant(node, spec.target)
            case _:
                raise InternalError(f"input {node.name} of kind {spec.kind}")

    def _constant(self, node: fx.Node, target: str) -> None:
        """A tensor that forward created from Python numbers. Small ones become literals, as do the parts of which large
        ones are repetitions, such as positions in equal images.
        """
        type = tensor_type(node.meta["val"], "a constant of forward")
        values = self._constants.get(target)
        known = values is not None and not values.is_meta and not hasattr(values, "fake_mode")
        part = repeated_part(values) if values is not None and known else None
        result = Value(name=node.name, type=type)
        if part is not None:
            self._literal(*part, result)
        elif 0 in type.shape:
            self._add("full", (type.shape, 0), (("dtype", DTypeArg(type.dtype)),), (result,), None)
        else:
            raise PartcError(
                "P0211",
                f"forward uses a constant tensor of shape {type.shape} that is not a buffer of the model",
                help="register it as a buffer of the model, or make the module that has it a part of the model",
                source=source_of(next(iter(node.users), node)),
            )

    def _literal(self, part: Tensor, dim: int, result: Value) -> None:
        """Numbers written down, and repeated along a dimension where the result has more of them."""
        numbers = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
        shape, whole = tuple(numbers.shape), result.type.shape
        kind = (("dtype", DTypeArg(result.type.dtype)),)
        if shape == whole:
            self._add("constant", (tuple(numbers.flatten().tolist()), whole), kind, (result,), None)
            return
        once, copied = ((*shape[:dim], n, *shape[dim:]) for n in (1, whole[dim] // shape[dim]))
        literal, copies = (
            Value(
                name=unique(f"{result.name}_{word}", self._taken), type=TensorType.replicated(result.type.dtype, size)
            )
            for word, size in (("part", once), ("copies", copied))
        )
        self._add("constant", (tuple(numbers.flatten().tolist()), once), kind, (literal,), None)
        self._add("expand", (Ref(literal.name), copied), (), (copies,), None)
        self._add("reshape", (Ref(copies.name), whole), (), (result,), None)

    def _body(self, module: fx.GraphModule) -> tuple[str, ...]:
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._node(node, module)
            elif node.op == "output":
                return tuple(self._names[item] for item in node.args[0])
        raise InternalError("a graph without an output")

    def _node(self, node: fx.Node, module: fx.GraphModule) -> None:
        name = _name(node)
        if node.target is operator.getitem or name in _DROPPED or _is_unread(node):
            return
        if name == MODULE_MARK:
            self._mark(node)
        elif name == RANDOM_BRANCH:
            self._branch(node)
        elif name == WIDE_MARK:
            self._wide += 1 if node.args[1] else -1
        elif name in (TESTED, KEPT, RETURNED):
            if name == TESTED or node.args[1] not in self._idle:
                self._add(name, tuple(map(self._arg, node.args)), (), (), source_of(node))
        elif name in _INLINED:
            self._inline(node, module)
        elif name == "hook_gradient":
            self._hook(node)
        elif (found := _windows(node) if name == "as_strided" else None) is not None:
            self._read_windows(node, found)
        elif is_complex(node, name):
            self._of_pairs(node, name)
        else:
            self._operation(node, name)

    def _branch(self, node: fx.Node) -> None:
        test, number, outcome, of_values = node.args
        self.branches.append(RandomBranch(
            test=self._names[test],  # type: ignore[index]
            number=number,  # type: ignore[arg-type]
            outcome=bool(outcome), of_values=bool(of_values), position=len(self._ops), source=source_of(node),
        ))  # fmt: skip

    def _operation(self, node: fx.Node, name: str) -> None:
        with _errors_at(node):
            self._check(node, name)
            results = self._results(node)
            args = tuple(self._arg(arg) for arg in node.args)
            attrs = {key: self._arg(arg) for key, arg in node.kwargs.items() if key not in _IGNORED}
        if name in _VIEWS_OR_COPIES and not attrs:
            name, args = _as_view(node, name, args, results[0].type)
        out = attrs.pop("out", None)
        if out is None:
            self._add(name, args, tuple(attrs.items()), results, source_of(node))
            return
        made = replace(results[0], name=f"{results[0].name}_made")
        self._add(name, args, tuple(attrs.items()), (made,), source_of(node))
        self._add("copy_", (out, Ref(made.name)), (), results, source_of(node))

    def _read_windows(self, node: fx.Node, found: Windows) -> None:
        """Replace `as_strided` by operations that read overlapping windows of rows."""
        dim, dims = found.dim, len(found.shape)
        kept = (*found.shape[:dim], (found.shape[dim] - found.size) // found.step + 1, *found.shape[dim + 1 :])
        order = (*range(dim + 1), dims, *range(dim + 1, dims))
        steps: tuple[tuple[str, tuple[Arg, ...], tuple[int, ...]], ...] = (
            ("reshape", (found.shape,), found.shape),
            ("unfold", (dim, found.size, found.step), (*kept, found.size)),
            ("slice", (dim, 0, found.count, 1), (*kept[:dim], found.count, *kept[dim + 1 :], found.size)),
            ("permute", (order,), tuple(node.meta["val"].shape)),
        )
        given = node.all_input_nodes[0]
        dtype = tensor_type(given.meta["val"], "an operand").dtype
        made = self._names[given]
        for name, args, shape in steps:
            result = node.name if name == "permute" else unique(f"{node.name}_{name}", self._taken)
            value = Value(name=result, type=TensorType.replicated(dtype, shape))
            self._add(name, (Ref(made), *args), (), (value,), source_of(node))
            made = result
        self._names[node] = made

    def _mark(self, node: fx.Node) -> None:
        """Replace the empty outputs of a call that was not traced by copies of its record's operations."""
        tensors: list[fx.Node] = node.args[0]  # type: ignore[assignment]
        number: int = node.args[1]  # type: ignore[assignment]
        assert self._repeated is not None
        names = tuple(self._names[tensor] for tensor in tensors)
        found = self._repeated.mark(number, module_of(node), names, self._weights)
        for tensor in tensors:
            self._names[tensor] = found.get(self._names[tensor], self._names[tensor])

    def _hook(self, node: fx.Node) -> None:
        """Let later operations read a hooked tensor from the operation that applies the hook to its gradient."""
        value, hooked, gradient = (self._names[arg] for arg in node.all_input_nodes)
        readers = [reader for reader in node.all_input_nodes[1].users if reader < node]
        if hooked in self._hooked or not all(map(_without_gradient, readers)):
            raise PartcError(
                "P0216",
                "a hook is put on the gradient of a tensor that was read before or has another one",
                help="register one hook, before the tensor is used",
                source=source_of(node),
            )
        self._hooked.add(node.name)
        result = Value(name=node.name, type=tensor_type(node.meta["val"], "a hooked tensor"))
        args = ((Ref(value),), (Ref(hooked),), (Ref(gradient),))
        self._add("own_gradient", args, ((HOOK_PARTS, node.args[3]),), (result,), source_of(node))  # type: ignore[arg-type]
        self._names[node.all_input_nodes[1]] = node.name

    def _check(self, node: fx.Node, name: str) -> None:
        """Refuse higher-order functions, and products of mixed dtypes, which would fail at run time.

        Raises PartcError P0222 and P0223.
        """
        if any(arg.op == "get_attr" for arg in node.all_input_nodes):
            raise PartcError(
                "P0223",
                f"torch's {name} runs functions of its own, which partc cannot cut",
                help="write it with torch.where, or with branches and loops over shapes and options",
            )
        if name not in _PRODUCTS or (name == "einsum" and not _sums(str(node.args[0]))):
            return
        vals = (other.meta.get("val") for other in node.all_input_nodes)
        found = {val.dtype for val in vals if isinstance(val, Tensor)}
        cast = {torch.float32, self._low} if self._low is not None else set()
        if torch.bool in found or (len(found) > 1 and not found <= cast):
            given = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
            raise PartcError(
                "P0222",
                f"{name} takes tensors of one dtype that it can multiply, not {given}",
                help="cast them with .to(x.dtype); all weights are held in one dtype, which --precision sets",
            )

    def _results(self, node: fx.Node) -> tuple[Value, ...]:
        value = node.meta.get("val")
        if _name(node).endswith("::_varlen_attn"):
            raise untraced(
                "attention with cu_seqlens only has a kernel for GPUs",
                help="mask by document: torch.searchsorted(cu_seqlens, positions, right=True) numbers them",
            )
        if _writes_operands(node):
            raise PartcError(
                "P0212",
                f"{_name(node)} writes into its operands without an underscore in its name",
                help="write it in operations that return new values",
            )
        if isinstance(value, Tensor):
            self._names[node] = node.name
            return (Value(name=node.name, type=tensor_type(value, f"the result of {_name(node)}")),)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise untraced(
                "a branch, a size or a Python number depends on the values of a tensor",
                help="keep the value a tensor: choose with torch.where, mask elements in place of selecting them",
            )
        if not isinstance(value, tuple | list):
            raise untraced(
                f"{_name(node)} is not an operation on tensors",
                help="torch.func's transforms and side effects cannot be traced: write the operations out",
            )
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        results = []
        for index, item in enumerate(value):
            name = items[index].name if index in items else f"{node.name}_{index}"
            if index in items:
                self._names[items[index]] = name
            results.append(Value(name=name, type=tensor_type(item, f"a result of {_name(node)}")))
        return tuple(results)

    def _inline(self, node: fx.Node, module: fx.GraphModule) -> None:
        """Replace a higher-order operation that runs a submodule by the submodule's operations.

        Raises PartcError P0223 for an autocast, whose casts the trace lacks.
        """
        if _name(node) == "wrap_with_autocast" and node.args[2]:
            raise PartcError(
                "P0223",
                "forward turns on torch.autocast, whose casts are not in the trace",
                help="leave it out, and compile with --precision bf16 or fp16",
                source=source_of(node) or next(filter(None, map(source_of, node.users)), None),
            )
        operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        body = getattr(module, str(operands[0].target))
        places = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        for inner, outer in zip(places, operands[1:], strict=True):
            self._names[inner] = self._names[outer]
        prefix = len(self._ops)
        self._rename_inner(body, f"{node.name}_{prefix}")
        outputs = self._body(body)
        if _name(node) != "wrap_with_autocast" and node.args[0] is False:
            self._silence(prefix)
        results: tuple[fx.Node, ...] = body.graph.output_node().args[0]
        for user in node.users:
            if user.target is operator.getitem:
                index: int = user.args[1]  # type: ignore[assignment]
                changed = _changed_tensor(results[index])
                if node.args[0] is not False:
                    self._names[user] = outputs[index]
                elif changed in places:
                    self._names[user] = self._names[changed]
                else:
                    self._names[user] = self._stopped(user, outputs[index])

    def _silence(self, start: int) -> None:
        """Mark changes in place under no_grad, whose new values have no gradient."""
        changes = [place for place in range(start, len(self._ops)) if is_change(self._ops[place])]
        if not changes:
            return
        trained = [self.states[name] for name in self._trained if name in self.states]
        outside, live = (
            reached(Graph(inputs=(), ops=tuple(ops), outputs=()), trained) for ops in (self._ops[:start], self._ops)
        )
        parameters = {value.name for value in self.params}
        types = {value.name: value.type for op in self._ops for value in op.results}
        types |= {value.name: value.type for value in (*self.params, *self.inputs)}
        inside = {value.name: op for op in self._ops[start:] for value in op.results}
        for place in changes:
            op = self._ops[place]
            target = memory_owner(next(op.refs()), inside, types)
            passed = ((PASSED_BY, True),) if target in outside and target not in parameters else ()
            if passed or not live.isdisjoint(op.refs()):
                self._ops[place] = replace(op, attrs=(*op.attrs, (NO_GRAD, True), *passed))

    def _of_pairs(self, node: fx.Node, name: str) -> None:
        """Replace an operation on complex numbers by operations on pairs of real ones."""
        with _errors_at(node):
            body = real_operations(node, name)
        places = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        for inner, outer in zip(places, node.all_input_nodes, strict=True):
            self._names[inner] = self._names[outer]
        for inner in body.graph.nodes:
            if inner.op == "call_function":
                inner.name = unique(f"{node.name}_{inner.name}", self._taken)
        self._wide += 1  # torch's autocast leaves complex numbers in fp32
        made = self._body(body)
        self._wide -= 1
        if not isinstance(node.meta["val"], tuple | list):
            self._names[node] = made[0]
            return
        for user in node.users:
            self._names[user] = made[user.args[1]]  # type: ignore[index]

    def _stopped(self, user: fx.Node, made: str) -> str:
        """Detach a value that was computed under no_grad."""
        value = Value(name=f"{user.name}_stopped", type=tensor_type(user.meta["val"], user.name))
        self._add("detach", (Ref(made),), (), (value,), source_of(user))
        return value.name

    def _rename_inner(self, body: fx.GraphModule, prefix: str) -> None:
        """Rename operations whose names others have before them, or behind them as the items of a body's results do."""
        taken = self._shared | {value.name for op in self._ops for value in op.results}
        taken |= {value.name for value in (*self.params, *self.inputs)}
        for inner in body.graph.nodes:
            if inner.op == "call_function" and inner.name in taken:
                inner.name = f"{prefix}_{inner.name}"

    def _add(
        self,
        name: str,
        args: tuple[Arg, ...],
        attrs: tuple[tuple[str, Arg], ...],
        results: tuple[Value, ...],
        source: Source | None,
    ) -> None:
        wide = self._wide > 0 and self._low is not None
        self._ops.append(Op(name=name, args=args, attrs=attrs, results=results, source=source, wide=wide))

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            value = arg.meta.get("val")
            return value if isinstance(value, _NUMBERS) else Ref(self._names[arg])
        if isinstance(arg, torch.dtype):
            if arg not in DTYPE_NAMES:
                raise PartcError("P0209", f"tensors of {arg} are not supported", help="partc explain P0209")
            return DTypeArg(DTYPE_NAMES[arg])
        if isinstance(arg, list | tuple):
            return tuple(self._arg(item) for item in arg)
        if isinstance(arg, float) and math.isnan(arg):
            return math.nan  # the same object, so that operations with it compare equal
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        if isinstance(arg, torch.device | torch.layout | torch.memory_format):
            return None
        raise InternalError(f"an operation's argument has no place in the IR: {arg!r}")


@contextmanager
def _errors_at(node: fx.Node) -> Iterator[None]:
    """Errors without a source get that of the node."""
    try:
        yield
    except PartcError as error:
        error.source = error.source or source_of(node)
        raise


def _windows(node: fx.Node) -> Windows | None:
    """The overlapping windows of rows that `as_strided` reads; None for other reads, which need a contiguous tensor.

    Raises PartcError P0206.
    """
    given, size, stride, *offset = node.args
    assert isinstance(given, fx.Node)
    x: Tensor = given.meta["val"]
    found = windows(x, size, stride, offset[0] if offset else node.kwargs.get("storage_offset"))  # type: ignore[arg-type]
    if found is None and not x.is_contiguous():
        raise untraced(
            "as_strided reads a tensor whose elements are not in order",
            help="use views, unfold or index; or call .contiguous() first",
            source=source_of(node),
        )
    return found


def _as_view(node: fx.Node, name: str, args: tuple[Arg, ...], made: TensorType) -> tuple[str, tuple[Arg, ...]]:
    """The name and the arguments of a reshape: those of a view, if the operand's strides allow one."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    x: Tensor = given.meta["val"]
    if name == "contiguous":
        form: Any = node.kwargs.get("memory_format", torch.contiguous_format)
        return ("alias", args[:1]) if x.is_contiguous(memory_format=form) else (name, args)
    try:
        torch.empty_strided(x.shape, x.stride(), device="meta").view(made.shape)
    except RuntimeError:
        return name, args
    return "view", (args[0], made.shape)


def _is_unread(node: fx.Node) -> bool:
    """Whether a node computes a known number, or one that only other numbers read, as in guards."""
    value = node.meta.get("val")
    if isinstance(value, _NUMBERS):
        return True
    number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or _name(node) == "item"
    return number and all(_name(user) in _DROPPED or _is_unread(user) for user in node.users)


def _without_gradient(node: fx.Node) -> bool:
    """Whether a node reads a tensor without passing a gradient: it is a detach, or only detach reads its results."""
    name = _name(node)
    used = bool(node.users) and not name.endswith("_")
    return name == "detach" or (used and all(map(_without_gradient, node.users)))


def _nodes(module: nn.Module) -> Iterable[fx.Node]:
    return module.graph.nodes if isinstance(module, fx.GraphModule) else ()


# Python operators that change their operand, such as `|=`, and the torch operations that do the same.
_CHANGES = {
    "__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
    "__ilshift__": "bitwise_left_shift_", "__irshift__": "bitwise_right_shift_",
}  # fmt: skip


def _name(node: fx.Node) -> str:
    name = operation(node) or getattr(node.target, "__name__", str(node.target))
    return _CHANGES.get(name, name)


def _writes_operands(node: fx.Node) -> bool:
    """Whether an operation other than a change in place writes into an operand, as observers of quantization do."""
    schema, name = getattr(node.target, "_schema", None), _name(node)
    if schema is None or is_in_place(name):
        return False
    return any(x.alias_info and x.alias_info.is_write and not x.is_out for x in schema.arguments)


def _changed_tensor(node: fx.Node) -> fx.Node:
    """The tensor that the code has as this node, before the changes in place that end in the node."""
    node = returned(node)
    while isinstance(node.target, OpOverload) and is_in_place(_name(node)):
        node = returned(node.all_input_nodes[0])
    return node
