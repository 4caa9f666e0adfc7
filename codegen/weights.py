"""The weights of a pipeline stage: the tables that say what a rank holds, and what is done with it once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partc.codegen.calls import Run
from partc.codegen.collectives import local_bytes, moved, readable_bytes
from partc.codegen.names import Names
from partc.codegen.source import Line, RegionCode
from partc.parts import Parts
from partc.program import Parameter, Program
from partc.quoting import literal, literal_template, masked
from partc.reductions import Bucket, Reductions


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of one of the Stage's literal tables."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Parameters that several calls have under numbered prefixes."""

    constant: str  # the module's table of the region's parameters: "BLOCK"
    key: str  # an f-string of a name, from the loop's variables i and name
    numbers: str


@dataclass(frozen=True)
class Weights:
    """Of one stage: its runs of calls, and the code of their regions."""

    program: Program
    index: int
    runs: Sequence[Run]
    codes: Mapping[str, RegionCode]
    attributes: Names
    parts: Parts

    @cached_property
    def reductions(self) -> Reductions:
        return Reductions(self.program, self.index)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        return {parameter.name: parameter for parameter in self.program.parameters}

    def init(self) -> list[Line]:
        lines = []
        for run in self.runs:
            if not run.region.params:
                continue
            cls = self.codes[run.region.name].params_class
            makers = self._parted(run, cls) if self.parts.has_parts(run.calls[0]) else (cls, cls)
            lines.append(Line(code=f"{self.attribute(run)} = {self._tensors(run, makers[0], 'parameters')}"))
            if self.codes[run.region.name].differentiated and makers[1]:
                lines.append(
                    Line(code=f"{self.attribute(run, 'grad ')} = {self._tensors(run, makers[1], 'gradients')}")
                )
        parted = any("self.parts." in masked(line.code)[0] for line in lines)
        if parted:
            held = ("comm", "self.parameters", "parameters", "gradients")
            lines.insert(0, Line(code=f"self.parts = Parts({', '.join((*held, *self._moving()))})"))
        if self.reductions.buckets:
            lines.append(Line(code=f"self.sums = Sums({', '.join(self._summed(parted))})"))
        return lines

    def _summed(self, parted: bool) -> Iterator[str]:
        """What sums are made of."""
        yield from ("comm", "self.parameters", "gradients", "self.buckets", *(["self.parts"] if parted else []))
        yield from self._moving()

    def _moving(self) -> Iterator[str]:
        """How they go between nodes, and in what."""
        if self.program.near:
            yield f"near={strings(self.program.near)}"
        if self.program.wire:
            yield f"wire={literal(self.program.wire)}"
        if self.program.compress:
            compress = self.program.compress
            yield f"compress=kernels.{compress}" if self.program.fused else f"compress={literal(compress)}"

    def starts(self, run: Run) -> bool:
        """Whether sums are started, or go on from inside nodes to between them, in a run of calls."""
        early = [bucket for bucket in self.reductions.buckets if bucket.after]
        both = any(all(self.reductions.levels(bucket.over)) for bucket in early)
        return bool(early) and (both or any(bucket.after == call.name for bucket in early for call in run.calls))

    def started(self, run: Run) -> str:
        """What starts there, as a comment."""
        return self._words(call.name for call in run.calls)

    def _words(self, after: Iterable[str]) -> str:
        """`all-reduce 8.0 KiB over dp and reduce-scatter …`: what is summed after these calls."""
        names = set(after)
        here = [bucket for bucket in self.reductions.buckets if bucket.after in names]
        words = []
        for scattered, over in dict.fromkeys((bucket.scattered, bucket.over) for bucket in here):
            alike = [bucket for bucket in here if (bucket.scattered, bucket.over) == (scattered, over)]
            if scattered:
                words.append(moved([move for each in alike for move in self.parts.scattered_sums(each.parameters)]))
                continue
            size = sum(local_bytes(item.type, self.program.sizes) for each in alike for item in each.parameters)
            words.append(f"all-reduce {readable_bytes(size)} over {','.join(over)}")
        return " and ".join(words)

    def buckets(self) -> tuple[str, ...]:
        """The lines of the Stage's table of what is summed, and when."""
        entries = [self._bucket(bucket) for bucket in self.reductions.buckets]
        if len(entries) == 1 and len(line := f"buckets = ({entries[0]},)") <= 116:
            return (line,)
        return ("buckets = (", *(f"    {entry}," for entry in entries), ")") if entries else ()

    def _bucket(self, bucket: Bucket) -> str:
        trained, reductions = self.reductions.trained, self.reductions
        chosen = bucket.parameters
        between = trained[trained.index(chosen[0]) : trained.index(chosen[-1]) + 1]
        over = lambda item: item.gather if bucket.scattered else reductions.axes(item)  # noqa: E731
        alike = [each for each in between if not reductions.sharers(each) and over(each) == bucket.over]
        which = f"first={literal(chosen[0].name)}, last={literal(chosen[-1].name)}"
        if tuple(alike) != chosen:
            which = f"names={strings(parameter.name for parameter in chosen)}"
        after = f"after={literal(bucket.after)}, " if bucket.after else ""
        scatter = ", scatter=True" if bucket.scattered else ""
        return f"Bucket({after}over={strings(bucket.over)}, {which}{scatter})"

    def attribute(self, run: Run, kind: str = "") -> str:
        """Loops over calls of one list, but of different regions, are numbered."""
        loops = [other for other in self.runs if other.loop and other.prefix == run.prefix]
        number = f"_{loops.index(run) + 1}" if run in loops[1:] else ""
        return "self." + self.attributes[kind + (f"{run.prefix}{number}" if run.loop else run.calls[0].name)]

    def _parted(self, run: Run, cls: str) -> tuple[str, str]:
        """What holds parameters and their gradients of which ranks have parts: each level keeps less of them whole."""
        kept, summed, unit = f"{cls}(*self.parts.keep(", f"{cls}(*self.parts.sums(", f"self.parts.unit({cls}, "
        return {0: (kept, cls), 1: (kept, summed), 2: (kept, unit), 3: (unit, "")}[self.program.zero]

    def _shard(self, parameter: Parameter) -> str:
        type = literal(f"{parameter.type.dtype}{parameter.type.layout.without(*self._small)}")
        parts = [type]
        if not parameter.trainable:
            parts.append("trainable=False")
        if self.reductions.axes(parameter):
            parts.append(f"reduce={strings(self.reductions.axes(parameter))}")
        if self.reductions.sharers(parameter):
            parts.append(f"shared={self.reductions.sharers(parameter)}")
        if self.parts.read.get(parameter.name, parameter.type.dtype) != parameter.type.dtype:
            parts.append(f"read={literal(self.parts.read[parameter.name])}")
        if parameter.gather:
            parts.append(f"gather={strings(parameter.gather)}")
        if parameter.holds:
            parts.append(f"holds={parameter.holds}")
        if parameter.aliases:
            parts.append(f"aliases={strings(parameter.aliases)}")
        return f"Shard({', '.join(parts)})"

    def _constant(self, run: Run) -> str:
        return self.codes[run.region.name].constant

    @property
    def _small(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.program.sizes.items() if size == 1)

    def tables(self) -> tuple[tuple[tuple[str, tuple[Entry, ...]], ...], tuple[Entry | Repeated, ...]]:
        tables: dict[str, tuple[Entry, ...]] = {}
        entries: list[Entry | Repeated] = []
        seen: set[str] = set()
        for run in self.runs:
            table = self._table(run)
            constant = self._constant(run)
            numbers = run.numbers
            if numbers and table is not None and tables.setdefault(constant, table) == table:
                key = literal_template(run.prefix, ".{i}.{name}")
                entries.append(Repeated(constant=constant, key=key, numbers=counted(numbers)))
                seen.update(name for call in run.calls for name in call.params)
                continue
            for name in dict.fromkeys(name for call in run.calls for name in call.params):
                if name not in seen:
                    entries.append(Entry(key=name, value=self._shard(self.parameters[name])))
                    seen.add(name)
        return tuple(tables.items()), tuple(entries)

    def _table(self, run: Run) -> tuple[Entry, ...] | None:
        """The region's parameters, if they are the same for every call of a loop."""
        if not run.loop or not run.region.params:
            return None
        shards = [tuple(self._shard(self.parameters[name]) for name in call.params) for call in run.calls]
        if any(other != shards[0] for other in shards):
            return None
        return tuple(Entry(key=v.name, value=s) for v, s in zip(run.region.params, shards[0], strict=True))

    def _tensors(self, run: Run, cls: str, source: str) -> str:
        """The tuple (or list of tuples) of a run's parameters, or of their gradients."""
        if "self.parts." in cls:
            return self._named(run, cls)
        frozen = source == "gradients" and any(
            not self.parameters[name].trainable for call in run.calls for name in call.params
        )
        take: Callable[[str], str] = lambda key: f"{source}.get({key})" if frozen else f"{source}[{key}]"  # noqa: E731
        numbers = run.numbers
        if run.loop and numbers and self._table(run) is not None:
            key = literal_template(run.prefix, ".{i}.{name}")
            each = f"{cls}(*({take(key)} for name in {self._constant(run)}))"
            return f"[{each} for i in {counted(numbers)}]"
        quoted = [[take(literal(name)) for name in call.params] for call in run.calls]
        each_call = [f"{cls}({', '.join(items)})" for items in quoted]
        return f"[{', '.join(each_call)}]" if run.loop else each_call[0]

    def _named(self, run: Run, maker: str) -> str:
        """The same from the parameters' names."""
        close = ")" * maker.count("(")
        if run.loop and run.numbers and self._table(run) is not None:
            key = literal_template(run.prefix, ".{i}.{name}")
            names = f"*({key} for name in {self._constant(run)})"
            return f"[{maker}{names}{close} for i in {counted(run.numbers)}]"
        quoted = [", ".join(map(literal, call.params)) for call in run.calls]
        each = [f"{maker}{names}{close}" for names in quoted]
        return f"[{', '.join(each)}]" if run.loop else each[0]

    def reduce(self) -> list[Line]:
        if self.reductions.buckets:
            late = self._words([""])
            notes = (f"{late}, with what has been started",) if late else ()
            return [Line(code="self.sums.finish()", notes=notes)]
        if self.program.zero >= 2 and any(self.parts.has_parts(run.calls[0]) for run in self.runs):
            return [Line(code="self.parts.settle()")]
        return []

    def refresh(self) -> list[Line]:
        moves = list(self.parts.gathered_at_end(self.index))
        notes = (f"{moved(moves)}: each rank has updated a part",) if moves else ()
        if self.program.zero == 3 or not any(self.parts.has_parts(run.calls[0]) for run in self.runs):
            return []
        return [Line(code="self.parts.refresh()", notes=notes)]

    def shared(self) -> tuple[Entry, ...]:
        return tuple(
            Entry(key=str(places), value=strings(sorted(parameter.name for parameter in parameters)))
            for places, parameters in self.reductions.shared().items()
        )

    def shared_note(self) -> str:
        """What their sum moves, for a comment."""
        weights = [parameter for parameters in self.reductions.shared().values() for parameter in parameters]
        return readable_bytes(sum(local_bytes(parameter.type, self.program.sizes) for parameter in weights))


def counted(numbers: tuple[int, ...]) -> str:
    """What a loop over these goes through."""
    if numbers == tuple(range(numbers[0], numbers[0] + len(numbers))):
        return f"range({numbers[0]}, {numbers[-1] + 1})" if numbers[0] else f"range({numbers[-1] + 1})"
    return str(numbers)


def strings(items: Iterable[str]) -> str:
    quoted = list(map(literal, items))
    return f"({', '.join(quoted)}{',' * (len(quoted) == 1)})"
