"""The weights of a pipeline stage: the tables of its shards, and the operations on them once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from partc.codegen.calls import Run
from partc.codegen.source import Line
from partc.codegen.stage_facts import StageFacts
from partc.communication.exchanges import Exchanges, GradientSums
from partc.ir.printer import readable
from partc.ir.program import Bucket, Parameter, Program
from partc.quoting import literal, literal_template


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of one of the Stage's literal tables."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Parameters of several calls under numbered prefixes."""

    constant: str  # the module's table of the region's parameters: "BLOCK"
    key: str  # an f-string for a parameter's name, from the loop variables i and name
    numbers: str


@dataclass(frozen=True)
class Weights:
    """The weights of one stage."""

    facts: StageFacts

    @property
    def program(self) -> Program:
        return self.facts.program

    @property
    def exchanges(self) -> Exchanges:
        return self.facts.exchanges

    @property
    def sums(self) -> GradientSums:
        return self.exchanges.sums(self.facts.index)

    @cached_property
    def parted(self) -> bool:
        """Whether some calls read parameters in a different form from the one that ranks hold."""
        return any(run.region.params and self.exchanges.has_unit(run.calls[0]) for run in self.facts.every_run)

    @property
    def scatters(self) -> bool:
        """Whether gradients of whole parameters are summed up and scattered after the last microbatch."""
        return any(bucket.scattered for bucket in self.sums.buckets)

    def init(self) -> list[Line]:
        lines = []
        if self.parted:
            held = ("comm", "self.parameters", "parameters", "gradients", *(["sums"] if self.scatters else []))
            uses = frozenset({"Parts", *self._kernels})
            lines.append(Line(code=f"self.parts = Parts({', '.join((*held, *self._travel()))})", uses=uses))
        for run in self.facts.every_run:
            if not run.region.params:
                continue
            code = self.facts.codes[run.region.name]
            adds = any(function is not None and "g" in function.passes for function in (code.backward, code.weight))
            lines.append(Line(code=f"{self.facts.attribute(run)} = {self._units_or_tensors(run)}"))
            if adds:
                lines.append(Line(code=f"{self.facts.attribute(run, 'grad ')} = {self._gradients(run)}"))
        if self.sums.buckets:
            given = ("comm", "self.parameters", "gradients", "self.buckets", *(["self.parts"] if self.parted else []))
            uses = frozenset({"Sums", "Bucket", *self._kernels})
            lines.append(Line(code=f"self.sums = Sums({', '.join((*given, *self._travel()))})", uses=uses))
        return lines

    def _units_or_tensors(self, run: Run) -> str:
        cls = self._class(run)
        if not self.exchanges.has_unit(run.calls[0]):
            return self._tensors(run, cls, "parameters")
        gathered = any(self.exchanges.gathers(run.calls[0], kind) for kind in ("F", "B", "I", "W"))
        return self._named(run, f"self.parts.{'unit' if gathered or self.program.zero == 3 else 'keep'}({cls}, ")

    def _class(self, run: Run) -> str:
        """The tuple class of a region's parameters."""
        params = self.facts.codes[run.region.name].params
        return params.name if params else ""

    def _gradients(self, run: Run) -> str:
        """The gradients to which calls add; under ZeRO 1, those of whole parameters."""
        cls = self._class(run)
        if self.program.zero == 1 and self.exchanges.has_unit(run.calls[0]):
            return self._named(run, f"{cls}(*self.parts.sums(")
        return self._tensors(run, cls, "gradients")

    def _travel(self) -> Iterator[str]:
        """The arguments for the transport of gradients: axes inside nodes, element type, compression."""
        transport = self.program.transport
        if transport.near:
            yield f"near={strings(transport.near)}"
        if transport.wire:
            yield f"wire={literal(transport.wire)}"
        if code := transport.compress:
            yield f"compress=kernels.{code}" if self._kernels else f"compress={literal(code)}"

    @property
    def _kernels(self) -> tuple[str, ...]:
        """The module that encodes gradients, if the package has its own kernels."""
        return ("kernels",) if self.program.transport.compress and self.program.kernels == "triton" else ()

    def buckets(self) -> tuple[Entry, ...]:
        """The Stage's table of buckets."""
        return tuple(Entry(key=bucket.name, value=self._bucket(bucket)) for bucket in self.sums.buckets)

    def _bucket(self, bucket: Bucket) -> str:
        chosen = self.sums.parameters_in(bucket)
        between = self.sums.trained[self._order[chosen[0].name] : self._order[chosen[-1].name] + 1]
        over = lambda item: item.gather if bucket.scattered else self.sums.axes(item)  # noqa: E731
        alike = [each for each in between if not self.sums.sharers(each) and over(each) == bucket.over]
        which = f"first={literal(chosen[0].name)}, last={literal(chosen[-1].name)}"
        if tuple(alike) != chosen:
            which = f"names={strings(parameter.name for parameter in chosen)}"
        scatter = ", scatter=True" if bucket.scattered else ""
        return f"Bucket(over={strings(bucket.over)}, {which}{scatter})"

    @cached_property
    def _order(self) -> Mapping[str, int]:
        return {item.name: index for index, item in enumerate(self.sums.trained)}

    def _shard(self, parameter: Parameter) -> str:
        summed = self.sums.axes(parameter), self.sums.sharers(parameter)
        read = self.exchanges.read_dtypes[parameter.name]
        held = parameter.gather, parameter.holds, parameter.sparse, parameter.stacked, parameter.members
        own = parameter.aliases, parameter.sectioned, bool(parameter.counts)
        key = id(parameter.type), parameter.trainable, read, summed, held, own
        if key not in self._shards:
            self._shards[key] = self._shard_of(parameter)
        return self._shards[key]

    @cached_property
    def _shards(self) -> dict[tuple[object, ...], str]:
        return {}

    def _shard_of(self, parameter: Parameter) -> str:
        type = literal(f"{parameter.type.dtype}{parameter.type.layout.without(*self._small)}")
        parts = [type]
        if not parameter.trainable:
            parts.append("trainable=False")
        if axes := self.sums.axes(parameter):
            parts.append(f"reduce={strings(axes)}")
        if places := self.sums.sharers(parameter):
            parts.append(f"shared={places}")
        if (read := self.exchanges.read_dtypes[parameter.name]) != parameter.type.dtype:
            parts.append(f"read={literal(read)}")
        if parameter.gather:
            parts.append(f"gather={strings(parameter.gather)}")
        if parameter.holds:
            parts.append(f"holds={parameter.holds}")
        if parameter.sectioned:
            dim, ways, sections = parameter.sectioned
            parts.append(f"sectioned=Sectioned({dim}, ways={ways}, sections={sections})")
        if parameter.sparse and parameter.trainable:
            parts.append("sparse=True")
        if parameter.stacked:
            parts.append("stacked=True")
        if parameter.members:
            tables = (f"({literal(name)}, {first}, {rows})" for name, first, rows in parameter.members)
            parts.append(f"members=({', '.join(tables)},)")
        if parameter.counts:
            parts.append("counter=True")
        if parameter.aliases:
            parts.append(f"aliases={strings(parameter.aliases)}")
        return f"Shard({', '.join(parts)})"

    def _constant(self, run: Run) -> str:
        return self.facts.codes[run.region.name].constant

    @property
    def _small(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.program.sizes.items() if size == 1)

    def tables(self) -> tuple[tuple[tuple[str, tuple[Entry, ...]], ...], tuple[Entry | Repeated, ...]]:
        tables: dict[str, tuple[Entry, ...]] = {}
        entries: list[Entry | Repeated] = []
        seen: set[str] = set()
        for run in self.facts.every_run:
            table = self._table(run)
            constant = self._constant(run)
            numbers = run.numbers
            if numbers and table is not None and tables.setdefault(constant, table) == table:
                key = literal_template(run.prefix, ".{i}.{name}")
                entries.append(Repeated(constant=constant, key=key, numbers=counting_iterable(numbers)))
                seen.update(name for call in run.calls for name in call.params)
                continue
            for name in dict.fromkeys(name for call in run.calls for name in call.params):
                if name not in seen:
                    entries.append(Entry(key=name, value=self._shard(self.program.parameter(name))))
                    seen.add(name)
        return tuple(tables.items()), tuple(entries)

    def _table(self, run: Run) -> tuple[Entry, ...] | None:
        """The region's parameters, if they are the same for every call of a loop."""
        if id(run) not in self._known:
            self._known[id(run)] = self._table_of(run)
        return self._known[id(run)]

    @cached_property
    def _known(self) -> dict[int, tuple[Entry, ...] | None]:
        return {}

    def _table_of(self, run: Run) -> tuple[Entry, ...] | None:
        if not run.loop or not run.region.params:
            return None
        shards = [tuple(self._shard(self.program.parameter(name)) for name in call.params) for call in run.calls]
        if any(other != shards[0] for other in shards):
            return None
        return tuple(Entry(key=v.name, value=s) for v, s in zip(run.region.params, shards[0], strict=True))

    def _tensors(self, run: Run, cls: str, source: str) -> str:
        """The tuple (or list of tuples) of a run's parameters, or of their gradients."""
        frozen = source == "gradients" and any(
            not self.program.parameter(name).trainable for call in run.calls for name in call.params
        )
        take: Callable[[str], str] = lambda key: f"{source}.get({key})" if frozen else f"{source}[{key}]"  # noqa: E731
        numbers = run.numbers
        if run.loop and numbers and self._table(run) is not None:
            key = literal_template(run.prefix, ".{i}.{name}")
            each = f"{cls}(*({take(key)} for name in {self._constant(run)}))"
            return f"[{each} for i in {counting_iterable(numbers)}]"
        quoted = [[take(literal(name)) for name in call.params] for call in run.calls]
        each_call = [f"{cls}({', '.join(items)})" for items in quoted]
        return f"[{', '.join(each_call)}]" if run.loop else each_call[0]

    def _named(self, run: Run, maker: str) -> str:
        """The tuple (or list of tuples) of a run's parameters, from their names."""
        close = ")" * maker.count("(")
        if run.loop and run.numbers and self._table(run) is not None:
            key = literal_template(run.prefix, ".{i}.{name}")
            names = f"*({key} for name in {self._constant(run)})"
            return f"[{maker}{names}{close} for i in {counting_iterable(run.numbers)}]"
        quoted = [", ".join(map(literal, call.params)) for call in run.calls]
        each = [f"{maker}{names}{close}" for names in quoted]
        return f"[{', '.join(each)}]" if run.loop else each[0]

    def shared(self) -> tuple[Entry, ...]:
        return tuple(
            Entry(key=str(places), value=strings(sorted(parameter.name for parameter in parameters)))
            for places, parameters in self.sums.shared().items()
        )

    def shared_note(self) -> str:
        """The bytes that the sum of shared weights' gradients moves, as a comment."""
        weights = [parameter for parameters in self.sums.shared().values() for parameter in parameters]
        return readable(sum(parameter.type.local_bytes(self.program.sizes) for parameter in weights))


def counting_iterable(numbers: tuple[int, ...]) -> str:
    """The iterable of a loop over these numbers."""
    if numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
        return f"range({numbers[0]}, {numbers[-1] + 1})" if numbers[0] else f"range({numbers[-1] + 1})"
    return str(numbers)


def strings(items: Iterable[str]) -> str:
    quoted = list(map(literal, items))
    return f"({', '.join(quoted)}{',' * (len(quoted) == 1)})"
