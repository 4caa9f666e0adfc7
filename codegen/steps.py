"""The forward and backward methods of an emitted Stage: its calls in order, loops and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partc.codegen.access import LOCALS, Access, access
from partc.codegen.calls import Run
from partc.codegen.names import Names, emitted_name
from partc.codegen.operands import DTYPES
from partc.codegen.source import Function, Line, RegionCode
from partc.codegen.stage_facts import StageFacts
from partc.ir.naming import gradient_name
from partc.ir.program import Call, GraphKind
from partc.quoting import literal

_TAKEN = (
    "comm",
    "saved",
    "kept",
    "left",
    "gradients",
    "p",
    "g",
    "i",
    "name",
    "bucket",
    "self",
    "first",
    "last",
    *LOCALS,
)


def _names(facts: StageFacts, *more: str) -> Names:
    """The local variables of a method."""
    return Names((*_TAKEN, *more, *(function.name for code in facts.codes.values() for function in code.functions)))


def _wanted(facts: StageFacts) -> Mapping[str, str]:
    """The wanted names of values that a loop passes from call to call, before, in and after the loop: the region's
    own.
    """
    wanted: dict[str, str] = {}
    for run in facts.runs["microbatch"]:
        if run.loop:
            for argument, result in run.carried:
                name = run.region.forward.inputs[argument].name
                if _only_reader(facts, run.calls[0].args[argument], run.calls[0]):
                    wanted[run.calls[0].args[argument]] = name
                wanted[run.calls[-1].results[result]] = name
    return wanted


def _only_reader(facts: StageFacts, name: str, call: Call) -> bool:
    readers = [other for other in facts.calls if name in other.args]
    sent = any(transfer.value == name for transfer in facts.sent)
    return readers[:1] == [call] and not sent and set(c.name for c in readers) <= {call.name}


class ForwardWriter:
    """Writes `forward`: one microbatch."""

    def __init__(self, facts: StageFacts) -> None:
        self.facts = facts
        self.names = _names(facts, "batch", "received")
        self.wanted = _wanted(facts)
        self.places = dict(facts.given)  # value -> its expression

    def lines(self) -> list[Line]:
        lines: list[Line] = []
        saves = any(self.facts.codes[run.region.name].saved for run in self.facts.runs["microbatch"])
        if saves:
            lines.append(Line(code="saved: list[Any] = []"))
        for run in self.facts.runs["microbatch"]:
            lines.extend(self._forward(run))
        sent = dict.fromkeys(t.value for t in self.facts.sent)
        sent.update(dict.fromkeys(filter(self.facts.makes, self.facts.program.returned)))
        values = ", ".join(f"{literal(name)}: {self.places[name]}" for name in sent)
        lines.append(Line(code=f"return {{{values}}}, {'saved' if saves else '[]'}"))
        return lines

    def _bind(self, name: str) -> str:
        """A new local variable for a program value."""
        self.places[name] = self.names.fresh(emitted_name(self.wanted.get(name, name)))
        return self.places[name]

    def _forward(self, run: Run) -> list[Line]:
        """A call, or a loop over calls, which hands values from each call to the next one."""
        lines: list[Line] = []
        first, last = run.calls[0], run.calls[-1]
        variables: dict[int, str] = {}
        for argument, result in run.carried:
            start = first.args[argument]
            place = self.places[start]
            if place.isidentifier() and _only_reader(self.facts, start, first):
                variable = place
            else:
                variable = self.names.fresh(emitted_name(run.region.forward.inputs[argument].name))
                lines.append(Line(code=f"{variable} = {place}"))
            variables[argument] = variable
            self.places[last.results[result]] = variable
        args = [variables.get(index) or self.places[name] for index, name in enumerate(first.args)]
        by_result = {result: variables[argument] for argument, result in run.carried}
        results = [
            by_result.get(index) or (self._bind(name) if self._is_read(name) else "_")
            for index, name in enumerate(last.results)
        ]
        code = self.facts.codes[run.region.name]
        way = access(self.facts, run, code.forward, "F")
        kept = [target for index, target in enumerate(results) if index not in code.stored]
        targets = [*kept, "kept"] if code.saved else kept
        assigned = f"{', '.join(targets)} = " if targets else ""
        call = f"{assigned}{code.forward.name}({self.facts.arguments(code.forward, run, args, p=way.p)})"
        hand = [Line(code="saved.append(kept)", indent=way.indent)] if code.saved else []
        return [*lines, *way.head, *way.before, Line(code=call, indent=way.indent), *way.after, *hand, *way.tail]

    def _is_read(self, name: str) -> bool:
        return name in self.facts.program.returned or any(name in call.args for call in self.facts.program.calls)


class BackwardWriter:
    """Writes `backward`, or its halves `backward_input` and `backward_weight`."""

    def __init__(self, facts: StageFacts) -> None:
        self.facts = facts
        self.names = _names(facts)
        self.wanted = _wanted(facts)
        self.runs = facts.runs["microbatch"]
        self.owed = self._owed()
        # value -> the expression of its gradient, if it is known
        self.grads = {each.value: f"gradients[{literal(each.value)}]" for each in facts.sent if each.gradient}

    def lines(self) -> list[Line]:
        lines = [Line(code="kept: list[Any] = []")] if self.facts.split else []
        for run in reversed(self.runs):
            if self.facts.codes[run.region.name].backward is None:
                continue
            lines.extend(self._backward_loop(run) if run.loop else self._backward_call(run))
        returned = {t.value: self.grads.get(t.value) for t in self.facts.received if t.gradient}
        values = ", ".join(f"{literal(name)}: {place}" for name, place in returned.items())
        lines.append(Line(code=f"return {{{values}}}{', kept' if self.facts.split else ''}"))
        return lines

    def weight(self) -> list[Line]:
        """The gradients of weights, from the values that the backward of inputs kept, last kept first."""
        lines: list[Line] = []
        for run in self.runs:
            function = self.facts.codes[run.region.name].weight
            if function is None:
                continue
            way = access(self.facts, run, function, "W")
            arguments = self.facts.arguments(function, run, (), p=way.p, g=way.g)
            given = "g = " if function.gives else ""
            code = f"{given}{function.name}({', '.join(filter(None, (arguments, 'kept.pop()')))})"
            lines.extend((*way.head, *way.before, Line(code=code, indent=way.indent), *way.after, *way.tail))
        return lines

    def _owed(self) -> set[str]:
        """The program values whose gradient is read by a call of this stage, or by the stage that sent the value."""
        owed = {t.value for t in self.facts.received if t.gradient}
        for run in self.runs:
            code = self.facts.codes[run.region.name]
            for call in run.calls:
                owed.update(call.results[index] for index in code.gradient_outputs)
        return owed

    def _incoming(self, name: str, lines: list[Line]) -> str:
        """The gradient of a call's result. Adds the lines for the loss's gradient, 1, and zeros for unread results."""
        if name in self.grads:
            return self.grads.pop(name)
        dtype = f"dtype={DTYPES[self.facts.types[name].dtype]}"
        shape = self.facts.types[name].layout.local_shape(self.facts.program.sizes)
        variable = self.names.fresh(emitted_name(gradient_name(self.wanted.get(name, name))))
        if name == self.facts.program.loss and self.facts.program.scaled:
            spread = f".expand({shape})" if shape else ""
            code = f"{variable} = self.comm.scale_here.to({dtype}, copy=True){spread}"
            lines.append(Line(code=code, uses=frozenset({"torch"})))
            return variable
        make = "zeros" if name != self.facts.program.loss else "ones"
        lines.append(
            Line(
                code=f"{variable} = torch.{make}({shape}, {dtype}, device=self.comm.device)", uses=frozenset({"torch"})
            )
        )
        return variable

    def _backward_call(self, run: Run) -> list[Line]:
        call, code = run.calls[0], self.facts.codes[run.region.name]
        lines: list[Line] = []
        incoming = [self._incoming(call.results[index], lines) for index in code.gradient_outputs]
        targets, sums = self._targets(call, code)
        assert code.backward is not None  # otherwise it would not run
        way = access(self.facts, run, code.backward, self._kind())
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
            wanted = emitted_name(gradient_name(self.wanted.get(name, name)))
            if name in self.grads:
                part = self.names.fresh(f"{wanted}_part")
                total = self.names.fresh(wanted) if not self.grads[name].isidentifier() else self.grads[name]
                sums.append(Line(code=f"{total} = {self.grads[name]} + {part}"))
                self.grads[name] = total
                targets.append(part)
            else:
                self.grads[name] = self.names.fresh(wanted)
                targets.append(self.grads[name])
        return targets, sums

    def _backward_loop(self, run: Run) -> list[Line]:
        code = self.facts.codes[run.region.name]
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
                    self.names.fresh(emitted_name(gradient_name(run.region.forward.inputs[by_result[index]].name)))
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
            wanted = emitted_name(gradient_name(name))
            total = self.names.fresh(wanted)
            part = self.names.fresh(f"{wanted}_part")
            lines.append(Line(code=f"{total} = {self.grads.get(name, '0.0')}"))
            sums.append(Line(code=f"    {total} = {total} + {part}"))
            self.grads[name] = total
            targets[index] = part
        results = [targets[index] for index in code.gradient_inputs]
        assert code.backward is not None  # a loop that passes a value along passes its gradient back
        way = access(self.facts, run, code.backward, self._kind())
        lines.extend(self._backward_statement(run, way, code.backward, incoming, results, sums))
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
        self,
        run: Run,
        way: Access,
        function: Function,
        incoming: list[str],
        targets: list[str],
        sums: Sequence[Line] = (),
    ) -> list[Line]:
        code = self.facts.codes[run.region.name]
        arguments = self.facts.arguments(function, run, (), p=way.p, g=way.g)
        values = [argument for argument in (arguments, *incoming) if argument]
        values += ["saved.pop()"] if code.saved else []
        more = [*(["g"] if function.gives else []), *(["left"] if code.kept else [])]
        used = [] if all(target == "_" for target in targets) and not more else [*targets, *more]
        hand = [Line(code="kept.append(left)", indent=way.indent)] if code.kept else []
        assigned = f"{', '.join(used)} = " if used else ""
        call = Line(code=f"{assigned}{function.name}({', '.join(values)})", indent=way.indent)
        return [*way.head, *way.before, call, *hand, *way.after, *sums, *way.tail]

    def _kind(self) -> GraphKind:
        return "I" if self.facts.split else "B"
