"""The rule of a scan: dimensions that every operation of its step treats as a batch may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from partc.ir.layout import Layout, Shard, Sizes
from partc.ir.program import Choice, Op, TensorType
from partc.ir.scans import Scan, scan_of
from partc.rules.local import localize
from partc.rules.rule import Dims, Factor, OpRule, make
from partc.rules.shapes import Builder, Types

Resolve = Callable[[Op, Mapping[str, TensorType]], OpRule | None]
Key = tuple[str, int]  # (value, dimension) in the step, or (operation with a colon, factor)
TIME = "t"


@dataclass(slots=True)
class _LinkedDims:
    """Sets of dimensions that are cut alike, as a union-find; the dimensions of `stopped` sets must stay whole."""

    above: dict[Key, Key] = field(default_factory=dict)
    stopped: set[Key] = field(default_factory=set)

    def root(self, key: Key) -> Key:
        path = []
        while (above := self.above.get(key, key)) != key:
            path.append(key)
            key = above
        self.above.update(dict.fromkeys(path, key))
        return key

    def join(self, a: Key, b: Key) -> None:
        a, b = self.root(a), self.root(b)
        if a == b:
            return
        self.above[b] = a
        if b in self.stopped:
            self.stopped.add(a)

    def stop(self, key: Key) -> None:
        self.stopped.add(self.root(key))

    def is_stopped(self, key: Key) -> bool:
        return self.root(key) in self.stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step with its operations' rules and the groups of its dimensions."""

    scan: Scan
    rules: tuple[OpRule | None, ...]
    groups: _LinkedDims
    names: Mapping[Key, str]  # of groups, as factors of the scan

    def name(self, value: str, dim: int) -> str:
        return self.names[self.groups.root((value, dim))]


def scans(resolve: Resolve) -> Builder:
    """The builder of scans' rules: factors are groups of linked dimensions; time must stay whole."""
    return lambda op, types: _rule(op, types, resolve)


def _rule(op: Op, types: Types, resolve: Resolve) -> OpRule:
    found = _analysed(scan_of(op), resolve)
    known = found.scan.step.definitions()
    sizes: dict[str, int] = {TIME: found.scan.length}
    stopped = {TIME}

    def dims_of(name: str, time: int | None) -> Dims:
        dims = []
        for dim, size in enumerate(known[name].type.shape):
            factor = found.name(name, dim)
            if sizes.setdefault(factor, size) != size or found.groups.is_stopped((name, dim)):
                stopped.add(factor)
            dims.append((factor,) if size != 1 else ())
        return tuple(dims) if time is None else (*dims[:time], (TIME,), *dims[time:])

    scan = found.scan
    places: list[int | None] = [*(None for _ in scan.states), *scan.dims_read, *(None for _ in scan.fixed)]
    operands = [
        (dims_of(value.name, at), type) for value, at, type in zip(scan.step.inputs, places, types, strict=True)
    ]
    results = [dims_of(value.name, None) for value in scan.states]
    results += [dims_of(name, at) for name, at in zip(scan.made, scan.dims_made, strict=True)]
    carried = {name for dims in (*(dims for dims, _ in operands), *results) for dim in dims for name in dim}
    sizes = {name: size for name, size in sizes.items() if name in carried or size != 1}
    rule = make(operands, results, sizes, blocked=stopped)
    kept = (factor for factor in rule.factors if factor.kind != "contracted")
    summed = tuple(
        Factor(factor.name, factor.size, "blocked") for factor in rule.factors if factor.kind == "contracted"
    )
    inner, work = _step_products(found, {factor.name for factor in rule.factors})
    return replace(rule, factors=(*kept, *summed, *inner), work=work)


def localized(op: Op, sizes: Sizes, resolve: Resolve) -> Op:
    """The scan with the step of one rank, whose values have local shapes."""
    if not any(choice.factor is not None and sizes[choice.axis] > 1 for choice in op.choices):
        return op
    found = _analysed(scan_of(op), resolve)

    def local(type: TensorType, name: str) -> TensorType:
        cut = {
            choice.axis: Shard(dim, choice.outer)
            for choice in op.choices
            for dim, size in enumerate(type.shape)
            if size != 1 and found.name(name, dim) == choice.factor
        }
        layout = Layout.build(type.shape, dict(cut), sizes)
        assert layout is not None
        return replace(type, layout=layout)

    ops = []
    for index, (inner, rule) in enumerate(zip(found.scan.step.ops, found.rules, strict=True)):
        names = {
            factor.name: found.names.get(found.groups.root((f"{index}:{factor.name}", 0)))
            for factor in (rule.factors if rule is not None else ())
        }
        choices = tuple(
            Choice(axis=choice.axis, factor=factor, outer=choice.outer)
            for choice in op.choices
            for factor, group in names.items()
            if group is not None and group == choice.factor
        )
        results = tuple(replace(value, type=local(value.type, value.name)) for value in inner.results)
        cut = localize(replace(inner, results=results, choices=choices), rule, sizes)
        results = tuple(replace(value, type=value.type.local(sizes)) for value in results)
        ops.append(replace(cut, results=results, choices=()))
    inputs = tuple(replace(v, type=local(v.type, v.name).local(sizes)) for v in found.scan.step.inputs)
    step = replace(found.scan.step, inputs=inputs, ops=tuple(ops))
    return replace(op, attrs=replace(found.scan, step=step).attrs)


def _analysed(scan: Scan, resolve: Resolve) -> _Step:
    """Link dimensions that the operations' rules identify, and the dimensions of states with those of their next
    values.
    """
    groups = _LinkedDims()
    types = scan.step.types()
    rules = []
    for index, op in enumerate(scan.step.ops):
        rule = resolve(op, types)
        rules.append(rule)
        values = [*op.refs(), *(value.name for value in op.results)]
        covered: list[Dims] = [] if rule is None else [*rule.operands, *rule.results]
        covered += [()] * (len(values) - len(covered))
        whole = [] if rule is None else [f.name for f in rule.factors if f.kind != "parallel"]
        whole += [] if rule is None else [factor for factor, _ in rule.sharded]
        for factor in whole:
            groups.stop((f"{index}:{factor}", 0))
        for name, dims in zip(values, covered, strict=True):
            for dim in range(len(types[name].shape)):
                factors = dims[dim] if dim < len(dims) else None
                if factors is None or len(factors) > 1:
                    groups.stop((name, dim))
                    for factor in factors or ():
                        groups.stop((f"{index}:{factor}", 0))
                elif factors:
                    groups.join((f"{index}:{factors[0]}", 0), (name, dim))
    for value, name in zip(scan.states, scan.following, strict=True):
        for dim in range(len(value.type.shape)):
            groups.join((value.name, dim), (name, dim))
    names: dict[Key, str] = {}
    for name, type in types.items():
        for dim in range(len(type.shape)):
            names.setdefault(groups.root((name, dim)), f"d{len(names)}")
    return _Step(scan=scan, rules=tuple(rules), groups=groups, names=names)


def _step_products(step: _Step, factors: set[str]) -> tuple[tuple[Factor, ...], tuple[tuple[str, ...], ...]]:
    """Factors that occur only within the step, and the matrix products of all steps."""
    inner: dict[str, Factor] = {}
    work: list[tuple[str, ...]] = []
    for index, rule in enumerate(step.rules):
        if rule is None:
            continue
        for product in rule.work:
            named = []
            for each in product:
                name = step.names.get(step.groups.root((f"{index}:{each}", 0)), f"{index}:{each}")
                if name not in factors:
                    inner[name] = Factor(name, rule.factor(each).size, "blocked")
                named.append(name)
            work.append((*named, TIME) if TIME in factors else tuple(named))
    return tuple(inner.values()), tuple(work)
