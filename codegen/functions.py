"""A region as Python: its forward and backward functions, line by line, and the classes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from partc.codegen.expressions import (
    accumulates,
    accumulation,
    emitted_type,
    expression,
    is_atom,
    is_chained,
    returns_more,
    unsummed,
    with_accumulation,
)
from partc.codegen.lifetimes import deletions, overwritten
from partc.codegen.names import Names, RegionNames, identifier
from partc.codegen.operands import Operands, argument_text, modules
from partc.codegen.partial_gradients import partial_sums, sum_statements
from partc.codegen.recompute_comments import recompute_comments
from partc.codegen.source import Argument, Function, Line, Record, RegionCode
from partc.codegen.views import without_idle_views
from partc.communication import descriptions as collectives
from partc.ir.layout import Sizes
from partc.ir.operations import shares_memory
from partc.ir.program import SCAN, Graph, Op, Ref, Region, Value
from partc.ir.ragged import ragged_rows
from partc.ir.routers import choices
from partc.ir.scans import scan_of
from partc.rules import demands_dense

# Operations whose second argument is a shape; True if -1 is allowed for the number of rows.
_SHAPED = {"reshape": True, "expand": True, "slice_backward": False, "select_backward": False}


def region_code(
    region: Region,
    sizes: Sizes,
    prefix: str,
    doc: str,
    called: RegionNames,
    updates: Mapping[int, str] | None = None,
    *,
    returned: Collection[int] = (),
    gives: bool = False,
    dense: Collection[str] = (),
    compiled: bool = False,
) -> RegionCode:
    """The code of a region. `prefix` is the module path that the sources of its operations share ("blocks.0").

    `updates` maps output positions to buffers. Such an output is copied into its buffer, and returned only if its
    position is in `returned`. Gradients of parameters are added to their buffers or, with `gives`, returned.
    `dense` values need no copy where a kernel demands dense memory.
    """
    fields = Names()
    for value in region.params:
        fields[value.name]
    writer = _Writer(
        region=region,
        sizes=sizes,
        called=called,
        fields=fields,
        saved=Names(),
        kept=Names(),
        prefix=prefix,
        updates=updates or {},
        stored=frozenset(updates or ()).difference(returned),
        gives=gives,
        dense=dense,
        module=Names(called.every),
        steps=[],
    )
    saves = region.backward is not None
    saved = region.saved if saves else ()
    forward = without_idle_views(replace(region.forward, outputs=(*region.forward.outputs, *saved)), sizes)
    outputs = region.forward.outputs
    # A record's fields are named by the function that creates it, so functions are written in execution order.
    first = writer.forward(forward, called.forward if saves else called.stem, doc)
    name = called.backward if region.weight is None else called.backward_input
    backward = writer.backward(region.backward, name) if region.backward else None
    return RegionCode(
        module=called.stem,
        constant=called.constant,
        forward=first,
        backward=backward,
        weight=writer.weight(region.weight, called.backward_weight) if region.weight else None,
        params=writer.record(called.params, fields, region.forward, [value.name for value in region.params]),
        saved=writer.record(called.saved, writer.saved, region.forward, saved),
        kept=writer.record(called.kept, writer.kept, region.backward, region.kept) if region.backward else None,
        stored=writer.stored,
        compiled=compiled,
        has_local=any(value.type.layout.local for graph in region.graphs for value in graph.definitions().values()),
        gradient_inputs=tuple(
            index
            for index, value in enumerate(region.forward.inputs)
            if region.backward and f"grad_{value.name}" in region.backward.outputs
        ),
        gradient_outputs=tuple(
            index
            for index, output in enumerate(outputs)
            if region.backward and f"grad_{output}" in {value.name for value in region.backward.inputs}
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    region: Region
    sizes: Sizes
    called: RegionNames
    fields: Names  # identifiers of parameters
    saved: Names
    kept: Names
    prefix: str
    updates: Mapping[int, str]
    stored: frozenset[int]  # positions of outputs that are stored in buffers and not returned
    gives: bool
    dense: Collection[str]
    module: Names  # identifiers of step functions
    steps: list[Function]  # step functions of the function being written

    def record(self, name: str, fields: Names, graph: Graph, values: Sequence[str]) -> Record | None:
        """The class of a record of a graph's values, with the names of `fields`; None if there are no values."""
        types = self.region.types(graph)
        order = _as_made(graph, values)
        found = tuple(Argument(name=fields[value], type="Tensor", layout=str(types[value])) for value in order)
        return Record(name=name, fields=found) if found else None

    def forward(self, graph: Graph, name: str, doc: str) -> Function:
        names = self._scope()
        inputs = [value for value in graph.inputs if value.name not in self._params]
        for value in inputs:
            names[value.name]
        counted = {op.results[0].name: chosen for chosen, op in choices(self.region).items()}
        lines = self._body(graph, names, {}, borrowed=inputs, counted=counted)
        count = len(self.region.forward.outputs)
        results = [names[output] for output in graph.outputs]
        returned = [result for index, result in enumerate(results[:count]) if index not in self.stored]
        for index, buffer in self.updates.items():
            lines.append(Line(code=f"p.{self.fields[buffer]}.copy_({results[index]})", uses=frozenset({"p"})))
        types = ["Tensor"] * len(returned)
        if results[count:]:
            kept = _record(self.called.saved, self.saved, graph, self.region.saved, results[count:])
            if len(results) > count + 4:
                lines.append(Line(code=f"saved = {kept}", uses=self._uses(graph.outputs)))
                kept = "saved"
            returned.append(kept)
            types.append(self.called.saved)
        if returned:
            lines.append(Line(code=f"return {', '.join(returned)}", uses=self._uses(graph.outputs)))
        arguments = self._arguments(lines, inputs, names)
        return Function(
            name=name, doc=doc, arguments=arguments, returns=_returns(types), lines=tuple(lines), steps=self._written()
        )

    def backward(self, graph: Graph, name: str) -> Function:
        original = graph.outputs
        graph = without_idle_views(graph, self.sizes)
        buffers, given = self._gradients(original, graph)
        names = self._scope()
        inputs = [value for value in graph.inputs if value.name not in self._params]
        grads = [value for value in inputs if value.name not in self.region.saved]
        for kept_name in self.region.saved:
            names.bind(kept_name, f"saved.{self.saved[kept_name]}")
        for value in grads:
            names[value.name]
        count = len(original) - len(self.region.kept)
        made = dict(zip(original[:count], graph.outputs, strict=False))
        gradients = (f"grad_{value.name}" for value in self.region.forward.inputs)
        wanted = [made[name] for name in gradients if name in made]
        kept = graph.outputs[count:]
        outputs = (*wanted, *given.values(), *kept)
        lines = self._body(replace(graph, outputs=outputs), names, buffers, borrowed=grads)
        arguments = [Argument(name="saved", type=self.called.saved)] if self.region.saved else []
        results = [names[output] for output in wanted]
        types = ["Tensor"] * len(results)
        if given:
            lines.append(self._gradient_return(given, names))
            results.append("g")
            types.append(self.called.params)
        if self.region.kept:
            fields = [names[name] for name in kept]
            results.append(_record(self.called.kept, self.kept, graph, self.region.kept, fields))
            types.append(self.called.kept)
        if results:
            lines.append(Line(code=f"return {', '.join(results)}", uses=self._uses((*wanted, *kept))))
        return Function(
            name=name,
            doc="",
            arguments=(*self._arguments(lines, grads, names), *arguments),
            returns=_returns(types),
            lines=tuple(lines),
            gives=bool(given),
            steps=self._written(),
        )

    def weight(self, graph: Graph, name: str) -> Function:
        """The function for gradients of parameters, from the values that the backward of inputs kept for them."""
        original = graph.outputs
        graph = without_idle_views(graph, self.sizes)
        names = self._scope()
        for value in graph.inputs:
            names.bind(value.name, f"kept.{self.kept[value.name]}")
        buffers, given = self._gradients(original, graph)
        lines = self._body(replace(graph, outputs=tuple(given.values())), names, buffers, borrowed=())
        if given:
            lines.extend((self._gradient_return(given, names), Line(code="return g")))
        arguments = (*self._arguments(lines, (), names), Argument(name="kept", type=self.called.kept))
        returns = self.called.params if given else "None"
        return Function(
            name=name,
            doc="",
            arguments=arguments,
            returns=returns,
            lines=tuple(lines),
            gives=bool(given),
            steps=self._written(),
        )

    def _written(self) -> tuple[Function, ...]:
        """The step functions of the function that has just been written."""
        steps = tuple(self.steps)
        self.steps.clear()
        return steps

    def _scan(self, op: Op, operands: Operands) -> str:
        """The call of a scan; its step becomes a function of the module."""
        scan = scan_of(op)
        graph = without_idle_views(scan.step, self.sizes)
        region = Region(name=self.region.name, params=(), forward=graph)
        forward = any(value.name in self.region.forward.definitions() for value in op.results)
        stem = f"{self.called.stem}_step{'' if forward else '_backward'}"
        writer = replace(self, region=region, fields=Names(), updates={}, stored=frozenset(), dense=(), steps=[])
        names = writer._scope()
        for value in graph.inputs:
            names[value.name]
        lines = writer._body(graph, names, {}, borrowed=graph.inputs)
        results = ", ".join(names[name] for name in graph.outputs)
        lines.append(Line(code=f"return {results}{',' if len(graph.outputs) == 1 else ''}"))
        step = Function(
            name=self.module.fresh(stem),
            doc="",
            arguments=writer._arguments(lines, graph.inputs, names),
            returns="tuple[Tensor, ...]",
            lines=tuple(lines),
            steps=writer._written(),
            step=True,
        )
        self.steps.extend((*step.steps, step))
        called = (
            f"{operands.named('partial')}({step.name}, {operands.named('comm')})"
            if "comm" in step.passes
            else step.name
        )
        options = [
            f"length={scan.length}",
            f"dims={operands.attrs['dims']}",
            *(["reverse=True"] if scan.reverse else []),
        ]
        first = "[0]" if len(op.results) == 1 else ""
        return f"{operands.named('scan')}({', '.join((called, *operands.args, *options))}){first}"

    def _gradients(self, original: tuple[str, ...], graph: Graph) -> tuple[dict[str, list[str]], dict[str, str]]:
        """The gradient buffers to which each value is added, or the gradients of parameters to return."""
        params = {f"grad_{value.name}": value.name for value in self.region.params}
        buffers: dict[str, list[str]] = {}
        given: dict[str, str] = {}
        for output, made in zip(original, graph.outputs, strict=True):
            if output in params and self.gives:
                given[params[output]] = made
            elif output in params:
                buffers.setdefault(made, []).append(f"g.{self.fields[params[output]]}")
        return buffers, given

    def _gradient_return(self, given: Mapping[str, str], names: Names) -> Line:
        """The line that returns the gradients of parameters, with None for those that the function does not compute."""
        values = (
            f"{self.fields[value.name]}={names[given[value.name]] if value.name in given else 'None'}"
            for value in self.region.params
        )
        return Line(code=f"g = {self.called.params}({', '.join(values)})", uses=self._uses(given.values()))

    def _memory(self, op: Op, write: Callable[[str], str], position: int) -> Callable[[str], str]:
        """The writer of values as arguments: a dense copy if the kernel requires one."""
        if not demands_dense(op, position):
            return write
        return lambda name: write(name) if name in self.dense else f"{write(name)}.contiguous()"

    @property
    def _params(self) -> frozenset[str]:
        return frozenset(value.name for value in self.region.params)

    def _uses(self, values: Iterable[str]) -> frozenset[str]:
        """{`p`} if some of the values are parameters."""
        return frozenset() if self._params.isdisjoint(values) else frozenset({"p"})

    def _scope(self) -> Names:
        names = Names(self.called.every)
        for value in self.region.params:
            names.bind(value.name, f"p.{self.fields[value.name]}")
        return names

    def _arguments(self, lines: list[Line], inputs: Iterable[Value], names: Names) -> tuple[Argument, ...]:
        """The arguments of a function: comm, p, g and number if some line reads them, then the tensors."""
        uses = frozenset[str]().union(*(line.uses for line in lines))
        types = {"comm": "Comm", "p": self.called.params, "g": self.called.params, "number": "int"}
        common = (Argument(name=name, type=type) for name, type in types.items() if name in uses)
        tensors = (Argument(name=names[v.name], type="Tensor", layout=str(v.type)) for v in inputs)
        return (*common, *tensors)

    def _body(
        self,
        graph: Graph,
        names: Names,
        buffers: Mapping[str, list[str]],
        borrowed: Iterable[Value],
        counted: Mapping[str, str] | None = None,
    ) -> list[Line]:
        """One line for each operation.

        `buffers` names the gradient buffers to which values are added; the caller frees `borrowed` values. `counted`
        maps a result to the choices of experts that are counted before its operation.
        """
        types = self.region.types(graph)
        uses = _use_counts(graph)
        order = _views_first(graph)
        remade = recompute_comments(replace(graph, ops=order), self.region, self.sizes)
        fresh = {
            value.name
            for op in order
            for value in op.results
            if not shares_memory(op, types) and uses.get(value.name) == 1 and value.name not in graph.outputs
        }
        freed = deletions(
            replace(graph, ops=order), keep={*graph.outputs, *(v.name for v in borrowed)}, sizes=self.sizes
        )
        started = {name for op in order if op.name == "wait" for name in op.refs()}
        inlined: dict[str, Line] = {}
        ragged = ragged_rows(self.region)
        bound = {value.name for value in graph.inputs}
        gone: list[str] = []
        lines = [
            Line(code=f"{buffer}.add_({names[value.name]})", uses=frozenset({"g"}))
            for value in graph.inputs
            for buffer in buffers.get(value.name, ())
        ]
        for index, op in enumerate(order):
            write = lambda name: inlined[name].code if name in inlined else names[name]  # noqa: E731
            operands = Operands.of(
                op,
                partial(self._memory, op, write),
                types,
                self.sizes,
                shapes=_with_rows(op, ragged, names),
                started=any(value.name in started for value in op.results),
                exclusive=bool(op.args) and isinstance(op.args[0], Ref) and op.args[0].name in fresh,
            )
            operands.used.update(modules((*op.args, *(value for _, value in op.attrs))), self._uses(op.refs()))
            operands.used.update(*(inlined[name].uses for name in op.refs() if name in inlined))
            comment = collectives.comment(op, graph, types, self.sizes, self._label, apart=operands.started)
            over = [f"written over {argument_text(op.args[place], write)}" for place in overwritten(op).values()]
            notes = tuple(filter(None, (remade.get(op.results[0].name), comment, *over)))
            if counted and op.results[0].name in counted:
                chosen = counted[op.results[0].name]
                lines.append(Line(code=f"comm.loads.count({write(chosen)})", uses=frozenset({"comm"})))
            statement = self._statement(op, operands, order, index, uses, graph, names, buffers, inlined, notes)
            lines.extend(statement)
            if any(line.binds for line in statement):
                bound.update(value.name for value in op.results)
            gone.extend(freed.get(index, ()))
            if statement and gone:
                dead = [names[name] for name in gone if name in bound and uses.get(name)]
                lines.extend([Line(code=f"del {', '.join(dead)}")] if dead else [])
                gone.clear()
        return lines

    def _statement(
        self,
        op: Op,
        operands: Operands,
        order: tuple[Op, ...],
        index: int,
        uses: Mapping[str, int],
        graph: Graph,
        names: Names,
        buffers: Mapping[str, list[str]],
        inlined: dict[str, Line],
        notes: tuple[str, ...],
    ) -> list[Line]:
        single = len(op.results) == 1
        if single and op.result.name in buffers and not uses.get(op.result.name, 0):
            first, *others = buffers[op.result.name]
            if not others and op.result.name not in graph.outputs:
                code = accumulation(first, operands)
                return [Line(code=code, layout=str(op.result.type), notes=notes, uses=frozenset(operands.used))]
        code = self._scan(op, operands) if op.name == SCAN else expression(operands)
        into = self._addable_buffers(op, uses, graph, buffers)
        if into:
            code = with_accumulation(into, operands)
        apart = partial_sums(op, uses, graph, buffers)
        if apart:
            code = unsummed(operands)
        following = order[index + 1] if index + 1 < len(order) else None
        if (
            single
            and not notes
            and not returns_more(op.name)
            and following is not None
            and self._joins(op, following)
            and uses[op.result.name] == 1
            and op.result.name not in graph.outputs
            and op.result.name not in buffers
            and is_atom(code)
        ):
            inlined[op.result.name] = Line(code=code, uses=frozenset(operands.used))
            return []
        made = [value for value in op.results[: len(op.results) - len(into)] if value.name not in apart]
        targets = [names[value.name] if self._is_read(value, uses, graph, buffers) else "_" for value in made]
        if single and returns_more(op.name):
            targets.append("*_")
        parts, sums = sum_statements(op, apart, buffers, names)
        known = {name: str(emitted_type(op, value)) for name, value in zip(targets, made, strict=False) if name != "_"}
        kinds = list(dict.fromkeys(known.values()))
        if len(kinds) > 1:
            notes = (*notes, ", ".join(f"{name}: {type}" for name, type in known.items()))
        layout = "" if len(kinds) != 1 else kinds[0] if len(known) == 1 else f"each {kinds[0]}"
        read = frozenset(operands.used)
        assignment = f"{', '.join((*targets, *parts))} = {code}"
        lines = [Line(code=assignment, layout=layout, notes=notes, uses=read, binds=True)]
        for value in made:
            lines += [
                Line(code=f"{buffer}.add_({names[value.name]})", uses=frozenset({"g"}))
                for buffer in buffers.get(value.name, ())
            ]
        return [*lines, *sums]

    def _joins(self, op: Op, following: Op) -> bool:
        """Whether an operation is written inline in the next one, as its first operand or as a weight's transpose."""
        transposed = op.name == "permute" and isinstance(op.args[0], Ref) and op.args[0].name in self._params
        if transposed and op.result.name in following.refs():
            return True
        return is_chained(following.name) and following.args[0] == Ref(op.result.name)

    @staticmethod
    def _addable_buffers(op: Op, uses: Mapping[str, int], graph: Graph, buffers: Mapping[str, list[str]]) -> list[str]:
        """The buffers to which the operation itself can add all results but the first; empty if it cannot."""
        more = [value.name for value in op.results[1:]] if accumulates(op.name) else []
        alone = all(len(buffers.get(name, ())) == 1 and not uses.get(name, 0) for name in more)
        return [buffers[name][0] for name in more] if alone and not {*more} & {*graph.outputs} else []

    @staticmethod
    def _is_read(value: Value, uses: Mapping[str, int], graph: Graph, buffers: Mapping[str, list[str]]) -> bool:
        return bool(uses.get(value.name)) or value.name in graph.outputs or value.name in buffers

    def _label(self, op: Op) -> str:
        """A label for an operation: its module, relative to the region, else its line in the model file."""
        inner = next((each for each in (op, *op.body) if each.source), op)
        module = inner.module.removeprefix(self.prefix).strip(".")
        if module or not inner.source:
            return module or inner.results[0].name
        return self.prefix if inner.module else f"{inner.source.file.rpartition('/')[2]}:{inner.source.line}"


def _with_rows(op: Op, ragged: frozenset[str], names: Names) -> dict[int, tuple[str, ...]]:
    """For an operation on a data-dependent number of rows: its shape arguments as source, by position."""
    if ragged.isdisjoint(value.name for value in op.results):
        return {}
    shape = op.args[1] if len(op.args) > 1 and op.name in _SHAPED else ()
    if not isinstance(shape, tuple) or not shape:
        return {}
    rows = "-1" if _SHAPED[op.name] else f"{names[next(name for name in op.refs() if name in ragged)]}.shape[0]"
    return {1: (rows, *map(str, shape[1:]))}


def _record(name: str, fields: Names, graph: Graph, values: Sequence[str], results: Sequence[str]) -> str:
    """The call that creates a record. Fields are named after the variables that fill them."""
    for value, result in zip(values, results, strict=True):
        fields.bind(value, fields.fresh(result if result.isidentifier() else identifier(value)))
    given = dict(zip(values, results, strict=True))
    return f"{name}({', '.join(f'{fields[value]}={given[value]}' for value in _as_made(graph, values))})"


def _as_made(graph: Graph, values: Iterable[str]) -> list[str]:
    """Values in the order in which a graph receives or computes them."""
    order = {name: index for index, name in enumerate(graph.definitions())}
    return sorted(values, key=lambda name: order.get(name, -1))


def _returns(types: Sequence[str]) -> str:
    """The annotation of a function that returns values of these types."""
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]" if types else "None"


def _use_counts(graph: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for op in graph.ops:
        for name in op.refs():
            counts[name] = counts.get(name, 0) + 1
    return counts


def _views_first(graph: Graph) -> tuple[Op, ...]:
    """The graph in which a view that is its operand's only reader directly follows the operand's operation."""
    uses = _use_counts(graph)
    made = {value.name: op for op in graph.ops for value in op.results if len(op.results) == 1}
    follower: dict[int, Op] = {}
    moved: set[int] = set()
    for op in graph.ops:
        if not is_chained(op.name) or not isinstance(op.args[0], Ref) or sum(1 for _ in op.refs()) != 1:
            continue
        maker = made.get(op.args[0].name)
        if maker is not None and uses[op.args[0].name] == 1 and op.args[0].name not in graph.outputs:
            follower[id(maker)] = op
            moved.add(id(op))
    order: list[Op] = []
    for op in graph.ops:
        following: Op | None = op if id(op) not in moved else None
        while following is not None:
            order.append(following)
            following = follower.get(id(following))
    return tuple(order)
