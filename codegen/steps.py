"""The forward and backward methods of an emitted Stage: its calls in order, loops and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from partc.codegen.calls import Run
from partc.codegen.collectives import moved
from partc.codegen.functions import Function, Line, RegionCode
from partc.codegen.names import Names, identifier
from partc.parts import Kind, Parts
from partc.program import Call, Parameter, Phase, Program, TensorType, Transfer


class Stage(Protocol):
    """What is known of the stage whose methods are written."""

    program: Program
    parts: Parts
    parameters: Mapping[str, Parameter]
    calls: list[Call]
    runs: dict[Phase, list[Run]]
    types: dict[str, TensorType]
    codes: dict[str, RegionCode]
    places: dict[str, str]
    sent: list[Transfer]
    received: list[Transfer]
    split: bool

    def attribute(self, run: Run, kind: str = "") -> str: ...
    def arguments(
        self, function: Function, run: Run, args: Iterable[str], comm: str, p: str = "", g: str = ""
    ) -> str: ...
    def placed(self, names: Iterable[str]) -> list[str]: ...
    def makes(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """How a run of calls gets at parameters and gradients: what a loop goes over, and what surrounds each call."""

    over: tuple[tuple[str, str], ...]  # variable -> the list it runs through
    p: str
    g: str
    notes: tuple[str, ...]
    opening: tuple[Line, ...]
    closing: tuple[Line, ...]


def _counting(run: Run) -> str:
    """The numbers of the calls' first random operations."""
    numbers = [call.random or 0 for call in run.calls]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    even = step > 0 and numbers == list(range(numbers[0], numbers[-1] + 1, step))
    return f"range({numbers[0]}, {numbers[-1] + step}, {step})" if even else str(tuple(numbers))


TORCH_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class Steps:
    """The forward and backward of one microbatch, with the names of their local variables."""

    def __init__(self, builder: Stage) -> None:
        self.b = builder
        self.functions = [
            function.name
            for code in builder.codes.values()
            for function in (code.forward, code.backward, code.weight)
            if function is not None
        ]
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
                "whole",
                "self",
                *self.functions,
            )
        )
        self.runs = builder.runs["microbatch"]
        self.wanted = self._wanted_names()

    def _wanted_names(self) -> dict[str, str]:
        """A value that a loop hands along is called what the region calls it, before, in and after the loop."""
        wanted: dict[str, str] = {}
        for run in self.runs:
            if run.loop:
                for argument, result in run.carried:
                    name = run.region.forward.inputs[argument].name
                    if self._only_reader(run.calls[0].args[argument], run.calls[0]):
                        wanted[run.calls[0].args[argument]] = name
                    wanted[run.calls[-1].results[result]] = name
        return wanted

    def _ahead(self, runs: Iterable[Run], kind: Kind) -> list[Line]:
        """What the calls of a method gather, in their order."""
        units: list[str] = []
        for run in runs:
            if self.b.parts.gathers(run.calls[0], kind):
                table = self.b.attribute(run)
                backwards = run.loop and kind in ("B", "I")
                units.append(f"*reversed({table})" if backwards else f"*{table}" if run.loop else table)
        note = "what each call reads is gathered while the one before it runs"
        return [Line(code=f"whole = ahead({', '.join(units)})", notes=(note,))] if units else []

    def forward(self) -> list[Line]:
        lines = self._ahead(self.runs, "F")
        saves = any(self.b.codes[run.region.name].differentiated for run in self.runs)
        if saves:
            lines.append(Line(code="saved: list[Saved] = []"))
        for run in self.runs:
            lines.extend(self._forward_loop(run) if run.loop else self._forward_call(run, run.calls[0]))
        sent = dict.fromkeys(t.value for t in self.b.sent)
        if self.b.makes(self.b.program.loss):
            sent[self.b.program.loss] = None
        values = ", ".join(f'"{name}": {self.b.places[name]}' for name in sent)
        lines.append(Line(code=f"return {{{values}}}, {'saved' if saves else '[]'}"))
        return lines

    def _call(self, run: Run, access: _Access, args: Sequence[str], results: Sequence[str], indent: str) -> list[Line]:
        code = self.b.codes[run.region.name]
        stored = {value for _, value in self.b.program.updates}
        kept = [target for target, name in zip(results, run.calls[-1].results, strict=True) if name not in stored]
        targets = [*kept, "kept"] if code.differentiated else kept
        arguments = self.b.arguments(code.forward, run, args, "self.comm", p=access.p)
        assigned = f"{', '.join(targets)} = " if targets else ""
        lines = [Line(code=f"{assigned}{code.forward.name}({arguments})", notes=access.notes, indent=indent)]
        if code.differentiated:
            lines.append(Line(code=f"{indent}saved.append(kept)"))
        return lines

    def _access(self, run: Run, function: Function, kind: Kind) -> _Access:
        """Where ranks hold parts, parameters are gathered and gradients scattered around the call."""
        parts, call, level = self.b.parts, run.calls[0], self.b.program.zero
        parted = level >= 2 and parts.has_parts(call)
        tables = {"p": self.b.attribute(run), "g": self.b.attribute(run, "grad ")}
        over: dict[str, str] = {name: name for name in ("p", "g", "number") if name in function.passes}
        if parted and level == 3:
            unit_of = ("unit",) if "g" in function.passes else ()
            over = {**dict.fromkeys(unit_of, "p"), **{name: name for name in ("number",) if name in function.passes}}
        elif parted:
            over = {"unit" if name == "g" else name: name for name in over}
        unit = "unit" if run.loop else tables["p" if level == 3 else "g"]
        names = {"p": "p", "g": "g"} if run.loop else {"p": "", "g": ""}
        opening: tuple[Line, ...] = ()
        closing: tuple[Line, ...] = ()
        scattered = parts.scattered(call, kind)
        if parted and "g" in function.passes:
            names["g"] = "g"
            trained = [name for name in call.params if self.b.parameters[name].trainable]
            some = (identifier(name) for name in scattered) if len(scattered) < len(trained) else ()
            fields = ", ".join(f'"{name}"' for name in some)
            opening = (Line(code=f"g = {unit}.zeros({fields})"),)
            moves = list(parts.after(call, kind))
            if moves:
                note = f"{moved(moves)}, until the next one starts: each rank keeps the sum for its part"
                closing = (Line(code=f"{unit}.scatter(g)", notes=(note,)),)
            closing = (*closing, Line(code="del g"))
        return _Access(
            over=tuple((name, _counting(run) if of == "number" else tables[of]) for name, of in over.items()),
            p="next(whole)" if parts.gathers(call, kind) else names["p"],
            g=names["g"],
            notes=tuple(f"{moved([move])}: each rank holds a part" for move in parts.before(call, kind)),
            opening=opening,
            closing=closing,
        )

    def _forward_call(self, run: Run, call: Call) -> list[Line]:
        args = self.b.placed(call.args)
        results = [self._bind(name) if self._is_read(name) else "_" for name in call.results]
        access = self._access(run, self.b.codes[run.region.name].forward, "F")
        return self._call(run, access, args, results, "")

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
        access = self._access(run, self.b.codes[run.region.name].forward, "F")
        return [*lines, Line(code=self._over(run, access)), *self._call(run, access, args, results, "    ")]

    def _only_reader(self, name: str, call: Call) -> bool:
        readers = [other for other in self.b.calls if name in other.args]
        sent = any(t.value == name for t in self.b.sent)
        return readers[:1] == [call] and not sent and set(c.name for c in readers) <= {call.name}

    def _is_read(self, name: str) -> bool:
        return name == self.b.program.loss or any(name in call.args for call in self.b.program.calls)

    # -- backward -------------------------------------------------------------------------------

    def backward(self) -> list[Line]:
        lines = self._ahead(reversed(self.runs), self._kind())
        lines.extend([Line(code="kept: list[Saved] = []")] if self._split() else [])
        self.grads: dict[str, str] = {t.value: f'gradients["{t.value}"]' for t in self.b.sent if t.gradient}
        taken = ("comm", "saved", "kept", "left", "gradients", "p", "g", "unit", "whole", "self")
        self.grad_names = Names((*taken, *self.functions))
        self.owed = self._owed()
        for run in reversed(self.runs):
            if not self.b.codes[run.region.name].differentiated:
                continue
            lines.extend(self._backward_loop(run) if run.loop else self._backward_call(run))
        returned = {t.value: self.grads.get(t.value) for t in self.b.received if t.gradient}
        values = ", ".join(f'"{name}": {place}' for name, place in returned.items())
        lines.append(Line(code=f"return {{{values}}}{', kept' if self._split() else ''}"))
        return lines

    def weight(self) -> list[Line]:
        """The gradients of weights, from what the backward of the inputs kept: the last kept is the first used."""
        lines = self._ahead(self.runs, "W")
        for run in self.runs:
            function = self.b.codes[run.region.name].weight
            if function is None:
                continue
            access = self._access(run, function, "W")
            lines.extend([Line(code=self._over(run, access))] if run.loop else [])
            arguments = self.b.arguments(function, run, (), "self.comm", p=access.p, g=access.g)
            code = f"{function.name}({', '.join(filter(None, (arguments, 'kept.pop()')))})"
            around = (*access.opening, Line(code=code, notes=access.notes), *access.closing)
            lines.extend(_indented(around, "    " if run.loop else ""))
        return lines

    def _over(self, run: Run, access: _Access, *, backwards: bool = False) -> str:
        """A loop over a run's calls, with what the function takes of their parameters and gradients."""
        lists = [f"reversed({table})" if backwards else table for _, table in access.over]
        if not lists:
            return f"for _ in range({len(run.calls)}):"
        over = f"zip({', '.join(lists)}, strict=True)" if len(lists) > 1 else lists[0]
        return f"for {', '.join(name for name, _ in access.over)} in {over}:"

    def _split(self) -> bool:
        return self.b.split

    def _owed(self) -> set[str]:
        """Program values whose gradient someone takes: a call of this stage, or the stage that sent it."""
        owed = {t.value for t in self.b.received if t.gradient}
        for run in self.runs:
            code = self.b.codes[run.region.name]
            for call in run.calls:
                owed.update(call.results[index] for index in code.gradient_outputs)
        return owed

    def _incoming(self, name: str, lines: list[Line]) -> str:
        """The gradient of a call's result; 1 for the loss and 0 for what nobody reads are made in `lines`."""
        if name in self.grads:
            return self.grads.pop(name)
        dtype = f"dtype=torch.{TORCH_DTYPES[self.b.types[name].dtype]}"
        shape = self.b.types[name].layout.local_shape(self.b.program.sizes)
        variable = self.grad_names.fresh(identifier(f"grad_{self.wanted.get(name, name)}"))
        make = "zeros" if name != self.b.program.loss else "full" if self._scaled() else "ones"
        size = f"{shape}, self.comm.scale" if make == "full" else f"{shape}"
        lines.append(Line(code=f"{variable} = torch.{make}({size}, {dtype}, device=self.comm.device)"))
        return variable

    def _scaled(self) -> bool:
        """Whether small gradients need a larger loss."""
        return any(value.type.dtype == "f16" for region in self.b.program.regions for value in region.params)

    def _backward_call(self, run: Run) -> list[Line]:
        call, code = run.calls[0], self.b.codes[run.region.name]
        lines: list[Line] = []
        incoming = [self._incoming(call.results[index], lines) for index in code.gradient_outputs]
        targets, sums = self._targets(call, code)
        access = self._access(run, code.backward, self._kind()) if code.backward else None
        return [*lines, *self._backward_statement(run, access, incoming, targets, ""), *sums]

    def _targets(self, call: Call, code: RegionCode) -> tuple[list[str], list[Line]]:
        """Variables for the gradients a call returns, and additions to those that are there already."""
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
        access = self._access(run, code.backward, self._kind())
        lines.append(Line(code=self._over(run, access, backwards=True)))
        lines.extend(self._backward_statement(run, access, incoming, results, "    "))
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
        self, run: Run, access: _Access | None, incoming: list[str], targets: list[str], indent: str
    ) -> list[Line]:
        code = self.b.codes[run.region.name]
        function = code.backward
        if function is None or access is None:
            taken = ["*saved.pop()"] if run.region.saved else []
            drop = [] if taken else [Line(code=f"{indent}saved.pop()")]
            values = [*incoming, *taken]
            left = f"({values[0]},)" if len(values) == 1 else f"({', '.join(values)})"
            return [*drop, Line(code=f"{indent}kept.append({left})")]
        arguments = self.b.arguments(function, run, (), "self.comm", p=access.p, g=access.g)
        values = [argument for argument in (arguments, *incoming) if argument]
        if any(argument.name == "saved" for argument in function.arguments):
            values.append("saved.pop()")
            drop = []
        else:
            drop = [Line(code=f"{indent}saved.pop()")]
        used = [] if all(target == "_" for target in targets) else targets
        hand: tuple[Line, ...] = ()
        if code.weight is not None:
            used, hand = [*targets, "left"], (Line(code="kept.append(left)"),)
        assigned = f"{', '.join(used)} = " if used else ""
        line = Line(code=f"{assigned}{function.name}({', '.join(values)})", notes=access.notes)
        return [*drop, *_indented((*access.opening, line, *hand, *access.closing), indent)]

    def _kind(self) -> Kind:
        return "I" if self._split() else "B"


def _indented(lines: Iterable[Line], indent: str) -> Iterator[Line]:
    return (replace(line, indent=indent) for line in lines)
