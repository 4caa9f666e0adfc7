"""A region as Python: its forward and backward functions, line by line, and the classes of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.codegen.function_bodies import BodyWriter
from partc.codegen.names import Names, RegionNames, emitted_name
from partc.codegen.operands import Operands
from partc.codegen.source import Argument, Function, Line, Record, RegionCode
from partc.codegen.views import without_idle_views
from partc.ir.layout import Sizes
from partc.ir.naming import gradient_name
from partc.ir.program import Graph, Op, Region, Value
from partc.ir.routers import choices
from partc.ir.scans import scan_of


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
    writer = _RegionWriter(
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
            if region.backward and gradient_name(value.name) in region.backward.outputs
        ),
        gradient_outputs=tuple(
            index
            for index, output in enumerate(outputs)
            if region.backward and gradient_name(output) in {value.name for value in region.backward.inputs}
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionWriter:
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
        gradients = (gradient_name(value.name) for value in self.region.forward.inputs)
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
        params = {gradient_name(value.name): value.name for value in self.region.params}
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
        """The lines of a graph (see `BodyWriter`)."""
        writer = BodyWriter(
            self.region,
            graph,
            self.sizes,
            names,
            buffers=buffers,
            dense=self.dense,
            prefix=self.prefix,
            scan=self._scan,
        )
        return writer.lines(borrowed, counted or {})


def _record(name: str, fields: Names, graph: Graph, values: Sequence[str], results: Sequence[str]) -> str:
    """The call that creates a record. Fields are named after the variables that fill them."""
    for value, result in zip(values, results, strict=True):
        fields.bind(value, fields.fresh(result if result.isidentifier() else emitted_name(value)))
    given = dict(zip(values, results, strict=True))
    return f"{name}({', '.join(f'{fields[value]}={given[value]}' for value in _as_made(graph, values))})"


def _as_made(graph: Graph, values: Iterable[str]) -> list[str]:
    """Values in the order in which a graph receives or computes them."""
    order = {name: index for index, name in enumerate(graph.definitions())}
    return sorted(values, key=lambda name: order.get(name, -1))


def _returns(types: Sequence[str]) -> str:
    """The annotation of a function that returns values of these types."""
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]" if types else "None"
