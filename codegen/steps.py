"""The forward and backward methods of an emitted Stage: its calls in order, loops and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partc.codegen.access import AHEAD, Access, Stage, access, opens, refreshed, settled
from partc.codegen.calls import Run
from partc.codegen.names import Names, identifier
from partc.codegen.operands import DTYPES
from partc.codegen.source import Function, Line, RegionCode
from partc.ir.program import BodyKind, Call, GraphKind
from partc.quoting import literal

_OPENS = "The first units of each action, which the action before it gets as `ahead` and starts to gather."
_KINDS: tuple[BodyKind, ...] = ("F", "B", "I", "W")


class StepWriter:
    """The forward and backward of one microbatch, with the names of their local variables."""

    def __init__(self, builder: Stage) -> None:
        self.b = builder
        self.functions = [function.name for code in builder.codes.values() for function in code.functions]
        self.names = Names(
            (
                "comm",
                "saved",
                "kept",
                "batch",
                "received",
                "gradients",
                "p",
                "g",
                "unit",
                "following",
                "coming",
                "former",
                "latest",
                "last",
                *AHEAD,
                "self",
                *self.functions,
            )
        )
        self.runs = builder.runs["microbatch"]
        self.wanted = self._wanted_names()

    def _wanted_names(self) -> dict[str, str]:
        """Names of values that a loop hands along: the region's own, before, in and after the loop."""
        wanted: dict[str, str] = {}
        for run in self.runs:
            if run.loop:
                for argument, result in run.carried:
                    name = run.region.forward.inputs[argument].name
                    if self._only_reader(run.calls[0].args[argument], run.calls[0]):
                        wanted[run.calls[0].args[argument]] = name
                    wanted[run.calls[-1].results[result]] = name
        return wanted

    def opens(self) -> list[Line]:
        """The table of the units that actions gather first."""
        found = {kind: opens(self.b, kind) for kind in _KINDS}
        rows = [f'    "{kind}": ({", ".join(units)},),' for kind, units in found.items() if units]
        table = [Line(code="self.opens = {", notes=(_OPENS,)), *(Line(code=row) for row in rows), Line(code="}")]
        return table if rows else []

    def ahead(self) -> dict[str, str]:
        """The parameters of methods, and the arguments that `backward` gives to its two halves."""
        parameters = AHEAD[: self.b.exchanges.levels]
        methods: dict[str, BodyKind] = {
            "forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W",
        }  # fmt: skip
        typed = "".join(f", {name}: Unit" for name in parameters)
        found = {method: typed if opens(self.b, kind) else "" for method, kind in methods.items()}
        if self._split():
            inputs, weights = opens(self.b, "I"), opens(self.b, "W")
            found["backward"] = typed if inputs or weights else ""
            given = ([*weights, *parameters][: len(parameters)] if inputs else [], parameters if weights else ())
            found["inputs"], found["weights"] = ("".join(f", {name}" for name in names) for names in given)
        return found

    def init(self) -> list[Line]:
        """The gathers of parameters that stay whole and never change, and the units that actions gather first."""
        return [*refreshed(self.b, "INIT"), *self.opens()]

    def reduce(self) -> list[Line]:
        """The waits and sums after a stage's last backward."""
        lines: list[Line] = []
        late = self.b.late()
        for each in self.b.program.body("REDUCE_GRAD", self.b.index):
            if each.subject == "scatter":
                lines.append(Line(code=f"{self.b.unit(each.of)}.settle()"))
            else:
                notes = (late,) if each.verb == "start" and late else ()
                lines.append(Line(code=f"self.sums.{each.verb}()", notes=notes))
        return lines

    def refresh(self) -> list[Line]:
        """The gathers of parameters that stay whole, as a step begins."""
        gathers = list(refreshed(self.b, "REFRESH"))
        said = self.b.refreshed()
        if gathers and said:
            gathers[0] = replace(gathers[0], notes=(said,))
        return gathers

    def forward(self) -> list[Line]:
        lines: list[Line] = []
        saves = any(self.b.codes[run.region.name].saved for run in self.runs)
        if saves:
            lines.append(Line(code="saved: list[Any] = []"))
        for run in self.runs:
            lines.extend(self._forward_loop(run) if run.loop else self._forward_call(run, run.calls[0]))
        sent = dict.fromkeys(t.value for t in self.b.sent)
        sent.update(dict.fromkeys(filter(self.b.makes, self.b.program.returned)))
        values = ", ".join(f"{literal(name)}: {self.b.places[name]}" for name in sent)
        lines.append(Line(code=f"return {{{values}}}, {'saved' if saves else '[]'}"))
        return lines

    def _call(self, run: Run, way: Access, args: Sequence[str], results: Sequence[str]) -> list[Line]:
        code = self.b.codes[run.region.name]
        kept = [target for index, target in enumerate(results) if index not in code.stored]
        targets = [*kept, "kept"] if code.saved else kept
        arguments = self.b.arguments(code.forward, run, args, "self.comm", p=way.p)
        assigned = f"{', '.join(targets)} = " if targets else ""
        call = Line(code=f"{assigned}{code.forward.name}({arguments})", indent=way.indent)
        hand = [Line(code="saved.append(kept)", indent=way.indent)] if code.saved else []
        return [*way.head, *way.before, call, *way.after, *hand]

    def _forward_call(self, run: Run, call: Call) -> list[Line]:
        args = self.b.placed(call.args)
        results = [self._bind(name) if self._is_read(name) else "_" for name in call.results]
        way = access(self.b, run, self.b.codes[run.region.name].forward, "F")
        return self._call(run, way, args, results)

    def _bind(self, name: str) -> str:
        """A new local variable for a program value."""
        self.b.places[name] = self.names.fresh(identifier(self.wanted.get(name, name)))
        return self.b.places[name]

    def _forward_loop(self, run: Run) -> list[Line]:
        lines: list[Line] = []
        first, last = run.calls[0], run.calls[-1]
        variables: dict[int, str] = {}
        for argument, result in run.carried:
            start = first.args[argument]
            place = self.b.places[start]
            if place.isidentifier() and self._only_reader(start, first):
                variable = place
            else:
                variable = self.names.fresh(identifier(run.region.forward.inputs[argument].name))
                lines.append(Line(code=f"{variable} = {place}"))
            variables[argument] = variable
            self.b.places[last.results[result]] = variable
        args = [variables.get(index) or self.b.places[name] for index, name in enumerate(first.args)]
        by_result = {result: variables[argument] for argument, result in run.carried}
        results = [
            by_result.get(index) or (self._bind(name) if self._is_read(name) else "_")
            for index, name in enumerate(last.results)
        ]
        way = access(self.b, run, self.b.codes[run.region.name].forward, "F")
        return [*lines, *self._call(run, way, args, results)]

    def _only_reader(self, name: str, call: Call) -> bool:
        readers = [other for other in self.b.calls if name in other.args]
        sent = any(t.value == name for t in self.b.sent)
        return readers[:1] == [call] and not sent and set(c.name for c in readers) <= {call.name}

    def _is_read(self, name: str) -> bool:
        return name in self.b.program.returned or any(name in call.args for call in self.b.program.calls)

    # -- backward -------------------------------------------------------------------------------

    def backward(self) -> list[Line]:
        lines = list(settled(self.b, self._kind()))
        lines += [Line(code="kept: list[Any] = []")] if self._split() else []
        self.grads: dict[str, str] = {t.value: f"gradients[{literal(t.value)}]" for t in self.b.sent if t.gradient}
        taken = ("comm", "saved", "kept", "left", "gradients", "p", "g", "unit", "i", "name", "self", "last")
        around = ("following", "coming", "former", "latest", *AHEAD)
        self.grad_names = Names((*taken, *around, *self.functions))
        self.owed = self._owed()
        for run in reversed(self.runs):
            if self.b.codes[run.region.name].backward is None:
                continue
            lines.extend(self._backward_loop(run) if run.loop else self._backward_call(run))
        returned = {t.value: self.grads.get(t.value) for t in self.b.received if t.gradient}
        values = ", ".join(f"{literal(name)}: {place}" for name, place in returned.items())
        lines.append(Line(code=f"return {{{values}}}{', kept' if self._split() else ''}"))
        return lines

    def weight(self) -> list[Line]:
        """The gradients of weights, from the values that the backward of inputs kept; the last kept is used first."""
        lines = list(settled(self.b, "W"))
        for run in self.runs:
            function = self.b.codes[run.region.name].weight
            if function is None:
                continue
            way = access(self.b, run, function, "W")
            arguments = self.b.arguments(function, run, (), "self.comm", p=way.p, g=way.g)
            given = "g = " if function.gives else ""
            code = f"{given}{function.name}({', '.join(filter(None, (arguments, 'kept.pop()')))})"
            lines.extend((*way.head, *way.before, Line(code=code, indent=way.indent), *way.after))
        return lines

    def _split(self) -> bool:
        return self.b.split

    def _owed(self) -> set[str]:
        """Program values whose gradient is used: by a call of this stage, or by the stage that sent the value."""
        owed = {t.value for t in self.b.received if t.gradient}
        for run in self.runs:
            code = self.b.codes[run.region.name]
            for call in run.calls:
                owed.update(call.results[index] for index in code.gradient_outputs)
        return owed

    def _incoming(self, name: str, lines: list[Line]) -> str:
        """The gradient of a call's result. `lines` gets the 1 of the loss, and zeros for results without readers."""
        if name in self.grads:
            return self.grads.pop(name)
        dtype = f"dtype={DTYPES[self.b.types[name].dtype]}"
        shape = self.b.types[name].layout.local_shape(self.b.program.sizes)
        variable = self.grad_names.fresh(identifier(f"grad_{self.wanted.get(name, name)}"))
        if name == self.b.program.loss and self._scaled():
            spread = f".expand({shape})" if shape else ""
            lines.append(Line(code=f"{variable} = self.comm.scale_here.to({dtype}, copy=True){spread}"))
            return variable
        make = "zeros" if name != self.b.program.loss else "ones"
        lines.append(Line(code=f"{variable} = torch.{make}({shape}, {dtype}, device=self.comm.device)"))
        return variable

    def _scaled(self) -> bool:
        """Whether small gradients need a larger loss."""
        return any(value.type.dtype == "f16" for region in self.b.program.regions for value in region.params)

    def _backward_call(self, run: Run) -> list[Line]:
        call, code = run.calls[0], self.b.codes[run.region.name]
        lines: list[Line] = []
        incoming = [self._incoming(call.results[index], lines) for index in code.gradient_outputs]
        targets, sums = self._targets(call, code)
        assert code.backward is not None  # or it would not be run
        way = access(self.b, run, code.backward, self._kind())
        return [*lines, *self._backward_statement(run, way, code.backward, incoming, targets), *sums]

    def _targets(self, call: Call, code: RegionCode) -> tuple[list[str], list[Line]]:
        """Variables for the gradients that a call returns, and additions to gradients that exist already."""
        targets: list[str] = []
        sums: list[Line] = []
        for index in code.gradient_inputs:
            name = call.args[index]
            if name not in self.owed:
                targets.append("_")
                continue
            wanted = identifier(f"grad_{self.wanted.get(name, name)}")
            if name in self.grads:
                part = self.grad_names.fresh(f"{wanted}_part")
                total = self.grad_names.fresh(wanted) if not self.grads[name].isidentifier() else self.grads[name]
                sums.append(Line(code=f"{total} = {self.grads[name]} + {part}"))
                self.grads[name] = total
                targets.append(part)
            else:
                self.grads[name] = self.grad_names.fresh(wanted)
                targets.append(self.grads[name])
        return targets, sums

    def _backward_loop(self, run: Run) -> list[Line]:
        code = self.b.codes[run.region.name]
        first, last = run.calls[0], run.calls[-1]
        carried = dict(run.carried)
        by_result = {result: argument for argument, result in run.carried}
        lines: list[Line] = []
        incoming: list[str] = []
        targets: dict[int, str] = {}
        sums: list[Line] = []
        for index in code.gradient_outputs:
            place = self._incoming(last.results[index], lines)
            if index in by_result:
                variable = (
                    self.grad_names.fresh(identifier(f"grad_{run.region.forward.inputs[by_result[index]].name}"))
                    if not place.isidentifier()
                    else place
                )
                if variable != place:
                    lines.append(Line(code=f"{variable} = {place}"))
                targets[by_result[index]] = variable
                incoming.append(variable)
            else:
                incoming.append(place)
        for index in code.gradient_inputs:
            name = first.args[index]
            if index in carried:
                continue
            if name not in self.owed:
                targets[index] = "_"
                continue
            wanted = identifier(f"grad_{name}")
            total = self.grad_names.fresh(wanted)
            part = self.grad_names.fresh(f"{wanted}_part")
            lines.append(Line(code=f"{total} = {self.grads.get(name, '0.0')}"))
            sums.append(Line(code=f"    {total} = {total} + {part}"))
            self.grads[name] = total
            targets[index] = part
        results = [targets[index] for index in code.gradient_inputs]
        assert code.backward is not None  # a loop hands a value along, whose gradient is handed back
        way = access(self.b, run, code.backward, self._kind())
        lines.extend(self._backward_statement(run, way, code.backward, incoming, results))
        lines.extend(sums)
        for argument, _ in run.carried:
            handed = targets.get(argument)
            name = first.args[argument]
            if handed is None or name not in self.owed:
                continue
            if name in self.grads:
                lines.append(Line(code=f"{handed} = {handed} + {self.grads[name]}"))
            self.grads[name] = handed
        return lines

    def _backward_statement(
        self, run: Run, way: Access, function: Function, incoming: list[str], targets: list[str]
    ) -> list[Line]:
        code = self.b.codes[run.region.name]
        arguments = self.b.arguments(function, run, (), "self.comm", p=way.p, g=way.g)
        values = [argument for argument in (arguments, *incoming) if argument]
        values += ["saved.pop()"] if code.saved else []
        more = [*(["g"] if function.gives else []), *(["left"] if code.kept else [])]
        used = [] if all(target == "_" for target in targets) and not more else [*targets, *more]
        hand = [Line(code="kept.append(left)", indent=way.indent)] if code.kept else []
        assigned = f"{', '.join(used)} = " if used else ""
        call = Line(code=f"{assigned}{function.name}({', '.join(values)})", indent=way.indent)
        return [*way.head, *way.before, call, *hand, *way.after]

    def _kind(self) -> GraphKind:
        return "I" if self._split() else "B"
