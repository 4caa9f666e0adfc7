"""A region as Python functions: its forward, its backward, line by line."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from partc.codegen import collectives
from partc.codegen.expressions import (
    accumulates,
    accumulation,
    expression,
    is_atom,
    is_chained,
    returns_more,
    unsummed,
    with_accumulation,
)
from partc.codegen.lifetimes import deletions, overwritten, shares_memory
from partc.codegen.names import Names, RegionNames
from partc.codegen.operands import Operands, written
from partc.codegen.parted import added, parted
from partc.codegen.remade import remarks
from partc.codegen.source import Argument, Function, Line, RegionCode
from partc.codegen.views import without_idle_views
from partc.layout import Sizes
from partc.program import Graph, Op, Ref, Region, Value
from partc.rules import demands_dense


def region_code(
    region: Region,
    sizes: Sizes,
    prefix: str,
    doc: str,
    called: RegionNames,
    updates: Mapping[int, str] | None = None,
    *,
    gives: bool = False,
    dense: Collection[str] = (),
) -> RegionCode:
    """`prefix` is the module path that sources of this region's operations share ("blocks.0").

    `updates` gives, for outputs that are buffers' next values, the buffers: they are stored, not returned.
    Gradients of parameters are added to those there are or, with `gives`, returned. `dense` values need no copy
    where a kernel demands dense memory.
    """
    fields = Names()
    for value in region.params:
        fields[value.name]
    writer = _Writer(
        region=region, sizes=sizes, fields=fields, prefix=prefix, updates=updates or {}, gives=gives, dense=dense
    )
    saves = region.backward is not None
    forward = without_idle_views(
        replace(region.forward, outputs=(*region.forward.outputs, *(region.saved if saves else ()))), sizes
    )
    params_class = called.params if region.params else ""
    outputs = region.forward.outputs
    backward = called.backward if region.weight is None else called.backward_input
    has_backward = region.backward is not None and (region.weight is None or bool(region.backward.ops))
    return RegionCode(
        constant=called.constant,
        params_class=params_class,
        fields=tuple(Argument(name=fields[v.name], type="Tensor", layout=str(v.type)) for v in region.params),
        forward=writer.forward(forward, called.forward if saves else called.stem, doc, params_class),
        backward=writer.backward(region.backward, backward, params_class) if has_backward and region.backward else None,
        weight=writer.weight(region.weight, called.backward_weight, params_class) if region.weight else None,
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
    fields: Names
    prefix: str
    updates: Mapping[int, str]
    gives: bool
    dense: Collection[str]

    def forward(self, graph: Graph, name: str, doc: str, params_class: str) -> Function:
        names = self._scope()
        inputs = [value for value in graph.inputs if value.name not in self._params]
        for value in inputs:
            names[value.name]
        lines = self._body(graph, names, {}, borrowed=inputs)
        count = len(self.region.forward.outputs)
        results = [names[output] for output in graph.outputs]
        returned = [result for index, result in enumerate(results[:count]) if index not in self.updates]
        saved = list(dict.fromkeys(results[count:]))
        for index, buffer in self.updates.items():
            lines.append(Line(code=f"p.{self.fields[buffer]}.copy_({results[index]})"))
        types = ["Tensor"] * len(returned)
        returns = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]" if types else "None"
        if self.region.backward is not None:
            kept = _tuple(results[count:])
            if len(saved) > 4:
                lines.append(Line(code=f"saved = {kept}"))
                kept = "saved"
            lines.append(Line(code=f"return {', '.join((*returned, kept))}"))
            returns = f"tuple[{', '.join((*types, 'Saved'))}]" if types else "Saved"
        elif returned:
            lines.append(Line(code=f"return {', '.join(returned)}"))
        arguments = self._arguments(lines, params_class, inputs, names)
        return Function(name=name, doc=doc, arguments=arguments, returns=returns, lines=tuple(lines))

    def backward(self, graph: Graph, name: str, params_class: str) -> Function:
        original = graph.outputs
        graph = without_idle_views(graph, self.sizes)
        buffers, given = self._gradients(original, graph)
        names = self._scope()
        inputs = [value for value in graph.inputs if value.name not in self._params]
        grads = [value for value in inputs if value.name not in self.region.saved]
        for value in inputs:
            names[value.name]
        count = len(original) - len(self.region.kept)
        made = dict(zip(original[:count], graph.outputs, strict=False))
        gradients = (f"grad_{value.name}" for value in self.region.forward.inputs)
        wanted = [made[name] for name in gradients if name in made]
        kept = graph.outputs[count:]
        outputs = (*wanted, *given.values(), *kept)
        lines = self._body(replace(graph, outputs=outputs), names, buffers, borrowed=grads)
        unpacked = [names[saved] for saved in self.region.saved]
        arguments = [Argument(name="saved", type="Saved")] if unpacked else []
        lines = _unpacked("saved", unpacked, lines)
        results = [names[output] for output in wanted]
        types = ["Tensor"] * len(results)
        if given:
            lines.append(self._given(given, names, params_class))
            results.append("g")
            types.append(params_class)
        if self.region.kept:
            results.append(_tuple([names[name] for name in kept]))
            types.append("Saved")
        returns = "None"
        if results:
            lines.append(Line(code=f"return {', '.join(results)}"))
            returns = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
        return Function(
            name=name,
            doc="",
            arguments=(*self._arguments(lines, params_class, grads, names), *arguments),
            returns=returns,
            lines=tuple(lines),
            gives=bool(given),
        )

    def weight(self, graph: Graph, name: str, params_class: str) -> Function:
        """The gradients of the parameters, from what the backward of the inputs kept for them."""
        original = graph.outputs
        graph = without_idle_views(graph, self.sizes)
        names = self._scope()
        for value in graph.inputs:
            names[value.name]
        buffers, given = self._gradients(original, graph)
        body = self._body(replace(graph, outputs=tuple(given.values())), names, buffers, borrowed=())
        lines = _unpacked("kept", [names[value.name] for value in graph.inputs], body)
        if given:
            lines.extend((self._given(given, names, params_class), Line(code="return g")))
        arguments = (*self._arguments(lines, params_class, (), names), Argument(name="kept", type="Saved"))
        returns = params_class if given else "None"
        return Function(name=name, doc="", arguments=arguments, returns=returns, lines=tuple(lines), gives=bool(given))

    def _gradients(self, original: tuple[str, ...], graph: Graph) -> tuple[dict[str, list[str]], dict[str, str]]:
        """The buffers that each value is added to; or the values that are parameters' gradients, to be returned."""
        params = {f"grad_{value.name}": value.name for value in self.region.params}
        buffers: dict[str, list[str]] = {}
        given: dict[str, str] = {}
        for output, made in zip(original, graph.outputs, strict=True):
            if output in params and self.gives:
                given[params[output]] = made
            elif output in params:
                buffers.setdefault(made, []).append(f"g.{self.fields[params[output]]}")
        return buffers, given

    def _given(self, given: Mapping[str, str], names: Names, params_class: str) -> Line:
        """All gradients that a function made of its parameters; None for others, made elsewhere or by nobody."""
        values = (names[given[value.name]] if value.name in given else "None" for value in self.region.params)
        return Line(code=f"g = {params_class}({', '.join(values)})")

    def _memory(self, op: Op, position: int, write: Callable[[str], str]) -> Callable[[str], str]:
        """How values are written as an argument: as a copy where the kernel demands dense memory."""
        if not demands_dense(op, position):
            return write
        return lambda name: write(name) if name in self.dense else f"{write(name)}.contiguous()"

    @property
    def _params(self) -> frozenset[str]:
        return frozenset(value.name for value in self.region.params)

    def _scope(self) -> Names:
        names = Names()
        for value in self.region.params:
            names.bind(value.name, f"p.{self.fields[value.name]}")
        return names

    def _arguments(
        self, lines: list[Line], params_class: str, inputs: Iterable[Value], names: Names
    ) -> tuple[Argument, ...]:
        """comm, p, g and number where some line reads them, then the tensors."""
        code = "\n".join(line.code for line in lines)
        common = [
            argument
            for argument in (
                Argument(name="comm", type="Comm"),
                Argument(name="p", type=params_class),
                Argument(name="g", type=params_class),
            )
            if _reads(code, argument.name) and not (self.gives and argument.name == "g")
        ]
        if re.search(r"comm\.(draw|counter)\(number", code):
            common.append(Argument(name="number", type="int"))
        tensors = (Argument(name=names[v.name], type="Tensor", layout=str(v.type)) for v in inputs)
        return (*common, *tensors)

    def _body(
        self, graph: Graph, names: Names, buffers: Mapping[str, list[str]], borrowed: Iterable[Value]
    ) -> list[Line]:
        """One line for each operation.

        `buffers` names the gradient buffers that values are added to; `borrowed` values are the
        caller's to free.
        """
        types = self.region.types(graph)
        uses = _use_counts(graph)
        order = _views_first(graph)
        remade = remarks(replace(graph, ops=order), self.region, self.sizes)
        fresh = {
            value.name
            for op in order
            for value in op.results
            if not shares_memory(op) and uses.get(value.name) == 1 and value.name not in graph.outputs
        }
        freed = deletions(
            replace(graph, ops=order), keep={*graph.outputs, *(v.name for v in borrowed)}, sizes=self.sizes
        )
        started = {name for op in order if op.name == "wait" for name in op.refs()}
        inlined: dict[str, str] = {}
        bound = {value.name for value in graph.inputs}
        gone: list[str] = []
        lines = [
            Line(code=f"{buffer}.add_({names[value.name]})")
            for value in graph.inputs
            for buffer in buffers.get(value.name, ())
        ]
        for index, op in enumerate(order):
            write = lambda name: inlined[name] if name in inlined else names[name]  # noqa: E731
            operands = Operands(
                op=op,
                args=tuple(written(arg, self._memory(op, index, write)) for index, arg in enumerate(op.args)),
                attrs={key: written(value, self._memory(op, -1, write)) for key, value in op.attrs},
                types=types,
                sizes=self.sizes,
                started=any(value.name in started for value in op.results),
                exclusive=bool(op.args) and isinstance(op.args[0], Ref) and op.args[0].name in fresh,
            )
            comment = collectives.comment(op, graph, types, self.sizes, self._label, apart=operands.started)
            over = [f"written over {written(op.args[place], write)}" for place in overwritten(op).values()]
            notes = tuple(filter(None, (remade.get(op.results[0].name), comment, *over)))
            statement = self._statement(op, operands, order, index, uses, graph, names, buffers, inlined, notes)
            lines.extend(statement)
            if any(" = " in line.code for line in statement):
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
        inlined: dict[str, str],
        notes: tuple[str, ...],
    ) -> list[Line]:
        single = len(op.results) == 1
        if single and op.result.name in buffers and not uses.get(op.result.name, 0):
            first, *others = buffers[op.result.name]
            if not others and op.result.name not in graph.outputs:
                return [Line(code=accumulation(first, operands), layout=str(op.result.type), notes=notes)]
        code = expression(operands)
        into = self._into(op, uses, graph, buffers)
        if into:
            code = with_accumulation(into, operands)
        apart = parted(op, uses, graph, buffers)
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
            inlined[op.result.name] = code
            return []
        made = [value for value in op.results[: len(op.results) - len(into)] if value.name not in apart]
        targets = [names[value.name] if self._is_read(value, uses, graph, buffers) else "_" for value in made]
        if single and returns_more(op.name):
            targets.append("*_")
        parts, sums = added(op, apart, buffers, names)
        layout = str(made[0].type) if made else ""
        lines = [Line(code=f"{', '.join((*targets, *parts))} = {code}", layout=layout, notes=notes)]
        for value in made:
            lines += [Line(code=f"{buffer}.add_({names[value.name]})") for buffer in buffers.get(value.name, ())]
        return [*lines, *sums]

    def _joins(self, op: Op, following: Op) -> bool:
        """Whether an operation is written where the next one reads it: its first operand, or a weight's transpose."""
        turned = op.name == "permute" and isinstance(op.args[0], Ref) and op.args[0].name in self._params
        if turned and op.result.name in following.refs():
            return True
        return is_chained(following.name) and following.args[0] == Ref(op.result.name)

    @staticmethod
    def _into(op: Op, uses: Mapping[str, int], graph: Graph, buffers: Mapping[str, list[str]]) -> list[str]:
        """The buffers that all results but the first are added to, where the operation can do that itself."""
        more = [value.name for value in op.results[1:]] if accumulates(op.name) else []
        alone = all(len(buffers.get(name, ())) == 1 and not uses.get(name, 0) for name in more)
        return [buffers[name][0] for name in more] if alone and not {*more} & {*graph.outputs} else []

    @staticmethod
    def _is_read(value: Value, uses: Mapping[str, int], graph: Graph, buffers: Mapping[str, list[str]]) -> bool:
        return bool(uses.get(value.name)) or value.name in graph.outputs or value.name in buffers

    def _label(self, op: Op) -> str:
        """The module an operation comes from, as seen from the region; else what it does."""
        module = op.source.module if op.source else ""
        module = module.removeprefix(self.prefix).strip(".")
        return module or op.name.removesuffix("_backward")


def _unpacked(source: str, names: list[str], lines: list[Line]) -> list[Line]:
    """The lines after one that takes a tuple apart, whose own hold on the tensors ends where they can be freed."""
    if not names:
        return lines
    freed = [Line(code=f"del {source}")] if any(line.code.startswith("del ") for line in lines) else []
    taken = f"({names[0]},)" if len(names) == 1 else ", ".join(names)
    return [Line(code=f"{taken} = {source}"), *freed, *lines]


def _use_counts(graph: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for op in graph.ops:
        for name in op.refs():
            counts[name] = counts.get(name, 0) + 1
    return counts


def _views_first(graph: Graph) -> tuple[Op, ...]:
    """A view that is the only reader of its operand stands right after what makes it."""
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


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def _reads(code: str, name: str) -> bool:
    return re.search(rf"\b{name}\.", code) is not None
