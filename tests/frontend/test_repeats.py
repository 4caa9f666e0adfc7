"""Equal modules are traced once: the program equals that of a whole trace, for equal and almost equal modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc import passes
from partc.frontend import trace
from partc.frontend.capture import capture
from partc.ir.mesh import Mesh
from partc.ir.printer import print_program
from partc.ir.program import Program

SEEN: list[Tensor] = []
COUNT = {"calls": 0}


class Block(nn.Module):
    """A layer with parts; subclasses change one thing each."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.Sequential(nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


class ByIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class Alternating(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.wide = index % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.wide else x * torch.sigmoid(self.second(self.first(x)))


class Container(Block):
    """A container of its own kind: it has no truth value, as blocks under torch.compile have none."""

    def __len__(self) -> int:
        raise TypeError("Container does not support len()")


class ByDictionary(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self)["index"]


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        COUNT["calls"] += 1
        return super().forward(x) * COUNT["calls"]


class Leaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.norm(x))
        SEEN.append(hidden)
        return x + self.second(hidden)


class Detached(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.norm(x))
        return x + gate * self.second(F.relu(self.first(x)))


class Remembering(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape[0]
        return super().forward(x)


class Experts(Block):
    """A loop over experts. Each gets the rows that a mask selects, whose number no trace has."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x.argmax(-1) % 3, torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]) * x[rows, number, None])
        return super().forward(out)


class Normed(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch(x))


class Hooked(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.first.register_forward_hook(lambda module, args, out: out * (index + 1))


class HookedWeight(Block):
    """A hook changes the gradient of one block's weight."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 4:
            self.first.weight.register_hook(lambda grad: grad * 0.5)


class Low(nn.Parameter):
    """A class that marks weights."""


class OfClass(Block):
    """A weight of one block has another class."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 4:
            self.first.weight = Low(self.first.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if isinstance(self.first.weight, Low) else 1.0)


class Scaled(Block):
    """The weights have attributes, and are keys of a table; those of one block differ."""

    gains: ClassVar[dict[Any, float]] = {}

    def __init__(self, index: int) -> None:
        super().__init__(index)
        gain = 0.5 if index == 4 else 1.0
        vars(self.first.weight)["gain"] = gain
        self.gains.update({self.first.weight: gain, id(self.first.bias): gain * 3})

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.first.weight, self.first.bias
        return super().forward(x) * weight.gain * self.gains[weight] * self.gains[id(bias)]


class Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0]).repeat(4)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1)


class Masked(Block):
    """The last of five blocks has another mask."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mask", torch.ones(8, 8).tril(index // 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.mask


class Shifted(Block):
    """The last of five blocks has another shift."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("shift", torch.tensor(index // 4 + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(self.shift, 1)


FACTORS: dict[object, float] = {}  # of modules, and of their identities


class InTable(Block):
    """The last of five blocks has another factor in a table of modules."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        FACTORS[self] = FACTORS[id(self)] = 1.0 + index // 4

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTORS[self]


class InTableOfIdentities(InTable):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) * FACTORS[id(self)]


class Pair(NamedTuple):
    x: Tensor
    gate: Tensor


class Several(Block):
    """Two results with gradients of their own, one without, the input itself and a number."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = super().forward(x) * scale
        return {"pair": Pair(y, self.norm(x)), "first": [x, y.argmax(-1)], "scale": scale}


class Stack(nn.Module):
    def __init__(self, kind: Callable[[int], Block], depth: int, shared: bool = False) -> None:
        super().__init__()
        blocks = [kind(0 if shared else index) for index in range(depth)]
        self.blocks = nn.ModuleList([blocks[0]] * depth if shared else blocks)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.clear()
        COUNT["calls"] = 0
        for block in self.blocks:
            x = block(x)
        return (x + sum(y.sum() for y in SEEN)).square().mean()


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__(Block, 6)
        for block in self.blocks[2:]:
            block.first.weight = self.blocks[1].first.weight
        self.blocks[4].second.weight = self.blocks[5].second.weight


class Results(Stack):
    def __init__(self) -> None:
        super().__init__(Several, 5)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for index, block in enumerate(self.blocks):
            out = block(x, scale=2.0 if index < 3 else 3.0)
            total = total + out["pair"].gate.sum() * out["scale"]
            x = out["first"][0] + out["pair"].x if index < 4 else out["first"][0] + F.one_hot(out["first"][1], 8)
        return total + x.square().mean()


class ReadsOnlyOne(Stack):
    """The last call's first result, which has its own weights, does not reach the loss."""

    def __init__(self) -> None:
        super().__init__(Several, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            x = x + out["pair"].gate
        return x.square().mean()


class InPlace(Stack):
    def __init__(self) -> None:
        super().__init__(Block, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x.square().mean()


class DifferentModes(Stack):
    def __init__(self) -> None:
        super().__init__(Block, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x)
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # whether calls are copied
    "equal": (lambda: Stack(Block, 6), True),
    "one module": (lambda: Stack(Block, 6, shared=True), True),
    "by index": (lambda: Stack(ByIndex, 5), True),  # the norms are equal
    "alternating": (lambda: Stack(Alternating, 8), True),
    "without truth values": (lambda: Stack(Container, 5), True),
    "by dictionary": (lambda: Stack(ByDictionary, 5), True),
    "leaking": (lambda: Stack(Leaking, 5), True),
    "detached": (lambda: Stack(Detached, 5), True),
    "remembering": (lambda: Stack(Remembering, 5), True),
    "experts": (lambda: Stack(Experts, 5), True),
    "batch norms": (lambda: Stack(Normed, 5), True),
    "hooks": (lambda: Stack(Hooked, 5), True),
    "a hook on a weight": (lambda: Stack(HookedWeight, 7), True),
    "attributes of weights": (lambda: Stack(Scaled, 7), True),
    "classes of weights": (lambda: Stack(OfClass, 7), True),
    "weights in place": (lambda: Stack(Clamped, 7), True),
    "constants": (lambda: Stack(Constant, 5), True),
    "dropout": (lambda: Stack(Dropping, 5), True),
    "masks": (lambda: Stack(Masked, 5), True),
    "shifts": (lambda: Stack(Shifted, 5), True),
    "tables": (lambda: Stack(InTable, 5), True),
    "tables of identities": (lambda: Stack(InTableOfIdentities, 5), True),
    "tied": (Tied, True),
    "results": (Results, True),
    "one result": (ReadsOnlyOne, True),
    "in place": (InPlace, False),
    "modes": (DifferentModes, True),
}


@contextmanager
def noting(monkeypatch: pytest.MonkeyPatch, once: bool) -> Iterator[list[int]]:
    """A context in which models are traced whole, or equal modules once; the list gets the number of copied calls."""
    copied: list[int] = []

    def captured(*args: Any, excluded: Any = None, **kwargs: Any) -> Any:
        found = capture(*args, excluded=excluded if once else None, **kwargs)
        copied.append(sum(not call.traced for call in found.calls.values()))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(trace, "capture", captured)
        yield copied


def traced(build: Callable[[], nn.Module]) -> tuple[Program, str]:
    COUNT["calls"] = 0
    program = trace.trace_model(build, lambda: {"x": torch.zeros(4, 8)}, name="m", mesh=Mesh.parse("1")).program
    return program, print_program(passes.run(program, {}, until="outline")[-1].program)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_programs_are_those_of_whole_traces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    build, copies = MODELS[name]
    with noting(monkeypatch, once=True) as copied:
        once, text = traced(build)
    with noting(monkeypatch, once=False):
        whole, expected = traced(build)
    assert text == expected
    assert [p.trainable for p in once.parameters] == [p.trainable for p in whole.parameters]
    assert (copied[-1] > 0) == copies


def test_modules_that_differ_in_their_second_call_are_traced_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that neither modules nor arguments hold: only the operations of the second call show it."""
    with noting(monkeypatch, once=True) as copied:
        program, _ = traced(lambda: Stack(Counting, 4))
    factors = [op.args[1] for op in program.regions[0].forward.ops if op.name == "mul"]
    assert len(copied) > 1 and factors == [1, 2, 3, 4]


def test_copies_have_names_apart_from_entries_of_the_batch() -> None:
    """Copies of the second block's `gelu_1` are named by numbers of calls, as an entry may be."""
    names = [f"gelu_1_{number}" for number in range(40)]
    program = trace.trace_model(
        lambda: Stack(Block, 6),
        lambda: {name: torch.zeros(4, 8) for name in names},
        lambda model, batch: model(sum(batch.values())),
        name="m",
        mesh=Mesh.parse("1"),
    ).program
    graph = program.regions[0].forward
    made = [value.name for value in (*graph.inputs, *(value for op in graph.ops for value in op.results))]
    assert len(set(made)) == len(made)


def test_the_number_of_traced_calls_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for depth in (4, 40):
        seen: list[int] = []

        def captured(*args: Any, seen: list[int] = seen, **kwargs: Any) -> Any:
            found = capture(*args, **kwargs)
            nodes = [node for node in found.exported.graph.nodes if node.op == "call_function"]
            seen.append(sum("empty" not in node.name and "module_call" not in node.name for node in nodes))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(trace, "capture", captured)
            traced(lambda depth=depth: Stack(Block, depth))  # type: ignore[misc]
        counts += seen
    assert counts[0] == counts[1]
