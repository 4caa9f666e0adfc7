"""Rows of equal modules are traced in part: the outlined program equals that of a whole trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc import passes
from partc.errors import PartcError
from partc.frontend import trace
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.ir.program import Program
from partc.ir.repetitions import UnlikeError, restore_units
from partc.passes import outline
from tests.frontend.test_repeats import (
    Alternating,
    Block,
    ByIndex,
    Constant,
    Counting,
    Detached,
    Dropping,
    Hooked,
    Leaking,
    Normed,
    Remembering,
    Stack,
    noting,
    traced,
)
from tests.passes.test_heads import stack


class Other(nn.Module):
    """Blocks, and another use of them, of their weights or of their results."""

    def __init__(self, use: Callable[[nn.ModuleList, Tensor], Tensor], depth: int = 9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(depth)))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.blocks, x).square().mean()


def passed(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def collected(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    seen = []
    for block in blocks:
        x = block(x)
        seen.append(x)
    return torch.stack(seen)


def one_seen(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    seen = x
    for index, block in enumerate(blocks):
        x = block(x)
        seen = x if index == 5 else seen
    return x + seen


def skipped(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    before = x
    for block in blocks:
        x, before = block(x + before), x
    return x


def changed_between(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for index, block in enumerate(blocks):
        x = block(x)
        if index == 6:
            x.mul_(2.0)
    return x


def scaled_once(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for index, block in enumerate(blocks):
        x = block(x) if index != 5 else 2.0 * block(x)
    return x


def weight_read(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return passed(blocks, x) + blocks[5].first.weight.sum()


def weights_decayed(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return passed(blocks, x) + sum(weight.square().sum() for weight in blocks.parameters())


def turned(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in reversed(blocks):
        x = block(x)
    return x


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return passed(blocks, passed(blocks, x))


def ended_early(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return passed(blocks[:7], x)


def side_by_side(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.stack([block(x) for block in blocks]).sum(0)


def half_without_gradients(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = passed(blocks[:8], x)
    return passed(blocks[8:], x)


def masked(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    for block in blocks:
        x = block(x * gate)
    return x


class Gated(Block):
    """Two values that pass from block to block, and one that all read."""

    def forward(self, given: tuple[Tensor, Tensor], gate: Tensor) -> tuple[Tensor, Tensor]:
        x, y = given
        return Block.forward(self, x) * gate, y + x


class GatedStack(Stack):
    def __init__(self, depth: int) -> None:
        super().__init__(Gated, depth)
        self.read = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = torch.sigmoid(x), self.read(x)
        pair = (x, 2.0 * x)
        for block in self.blocks:
            pair = block(pair, gate)
        return (pair[0] * pair[1]).square().mean()


def frozen() -> nn.Module:
    stack = Stack(Block, 9)
    for block in stack.blocks:
        block.first.weight.requires_grad = False
    return stack


def tied() -> nn.Module:
    stack = Stack(Block, 9)
    stack.blocks[5].first.weight = stack.blocks[6].first.weight
    return stack


def nested() -> nn.Module:
    stack = Stack(Block, 9)
    stack.blocks = nn.ModuleList(nn.Sequential(*map(Block, range(7))) for _ in range(7))
    return stack


def led() -> nn.Module:
    """Three blocks of one kind before ten of two others in turn."""
    stack = Stack(Block, 2)
    stack.blocks = nn.ModuleList([*map(Block, range(3)), *map(Alternating, range(14)), Dropping(0)])
    return stack


def hybrid(units: int = 6) -> nn.Module:
    """Seven blocks of one kind before each block of another."""
    stack = Stack(Block, 2)
    stack.blocks = nn.ModuleList(Alternating(int(index % 8 == 7)) for index in range(8 * units))
    return stack


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # whether some modules are left out
    "equal": (lambda: Stack(Block, 9), True),
    "alternating": (lambda: Stack(Alternating, 14), True),
    "two values": (lambda: GatedStack(8), True),
    "constants": (lambda: Stack(Constant, 9), True),
    "dropout": (lambda: Stack(Dropping, 9), True),
    "detached": (lambda: Stack(Detached, 9), True),
    "frozen": (frozen, True),
    "nested": (nested, True),
    "led": (led, True),
    "hybrid": (hybrid, True),
    "few": (lambda: Stack(Block, 5), False),
    "one module": (lambda: Stack(Block, 9, shared=True), False),
    "by index": (lambda: Stack(ByIndex, 9), False),
    "leaking": (lambda: Stack(Leaking, 9), False),
    "remembering": (lambda: Stack(Remembering, 9), False),
    "batch norms": (lambda: Stack(Normed, 9), False),
    "hooks": (lambda: Stack(Hooked, 9), False),
    "tied": (tied, False),
    **{
        use.__name__: (lambda use=use: Other(use), False)  # type: ignore[misc]
        for use in (
            collected, one_seen, skipped, changed_between, scaled_once, weight_read, weights_decayed, turned, twice,
            ended_early, side_by_side, half_without_gradients, masked,
        )
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_programs_are_those_of_whole_traces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    build, some = MODELS[name]
    part, text = traced(build)
    with noting(monkeypatch, once=False):
        whole, expected = traced(build)
    assert bool(part.repetitions) == some
    assert text == expected
    assert [(p.name, p.type, p.trainable) for p in part.parameters] == [
        (p.name, p.type, p.trainable) for p in whole.parameters
    ]
    assert parse(print_program(part, sources=True)) == part


def test_what_a_counter_changes_is_traced_each() -> None:
    program, _ = traced(lambda: Stack(Counting, 9))
    factors = [op.args[1] for op in program.regions[0].forward.ops if op.name == "mul"]
    assert not program.repetitions and factors == list(range(1, 10))


def part_counted(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    part: Any = blocks[5].norm
    part.calls = getattr(part, "calls", 0) + 1
    return passed(blocks, x) * part.calls


def test_a_changing_attribute_of_a_part_that_is_left_out_is_refused() -> None:
    with pytest.raises(PartcError, match=r"self\.calls of Sequential"):
        traced(lambda: Other(part_counted))


def test_exports_pass_over_the_parts_of_modules_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    export = torch.export.export

    def counted(step: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(sum(1 for _ in step.modules()))
        return export(step, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    for depth in (8, 40):
        traced(lambda depth=depth: Stack(Block, depth))  # type: ignore[misc]
    assert seen[-1] - seen[0] == 32


def test_traces_do_not_grow_with_depth() -> None:
    few, many = (traced(lambda depth=depth: Stack(Block, depth))[0] for depth in (8, 40))  # type: ignore[misc]
    assert len(few.regions[0].forward.ops) == len(many.regions[0].forward.ops)
    assert len(restore_units(many).regions[0].forward.ops) > 4 * len(many.regions[0].forward.ops)
    assert len(many.parameters) == 5 * len(few.parameters)


def test_rows_have_the_units_that_cover_most_modules() -> None:
    few, many = (traced(lambda units=units: hybrid(units))[0] for units in (6, 10))  # type: ignore[misc]
    assert len(few.regions[0].forward.ops) == len(many.regions[0].forward.ops)


def test_outlining_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = []
    link = outline.Linker.link
    counted = lambda self, *args, **given: linked.append(args) or link(self, *args, **given)  # noqa: E731
    monkeypatch.setattr(outline.Linker, "link", counted)
    calls = []
    for depth in (8, 40):
        linked.clear()
        program, _ = traced(lambda depth=depth: Stack(Block, depth))  # type: ignore[misc]
        calls.append((len(linked), len(passes.run(program, {}, until="outline")[-1].program.calls)))
    assert calls[0][0] == calls[1][0] and calls[1][1] - calls[0][1] == 32


def test_units_that_become_unlike_pass_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that changes one unit alone: the operations of all units are put back before the passes."""
    entry = passes.PIPELINE[0]
    normalize = entry.run

    class Changing(passes.Pass):
        @property
        def run(self) -> Callable[..., Program]:
            def changed(program: Program) -> Program:
                found = normalize(program)
                (main,) = found.regions
                last = max(i for i, op in enumerate(main.forward.ops) if op.name == "gelu")
                ops = tuple(
                    replace(op, name="relu", attrs=()) if i == last else op for i, op in enumerate(main.forward.ops)
                )
                return replace(found, regions=(replace(main, forward=replace(main.forward, ops=ops)),))

            return changed

    program = trace.trace_model(
        lambda: Stack(Block, 9), lambda: {"x": torch.zeros(4, 8)}, name="m", mesh=Mesh.parse("1")
    ).program
    changing = Changing(name=entry.name, label=entry.label, does="", requires=entry.requires, ensures=entry.ensures)
    monkeypatch.setattr(passes, "PIPELINE", (changing, *passes.PIPELINE[1:]))
    found = passes.run(program, {}, until="outline")[-1].program
    names = [op.name for call in found.calls for op in found.region(call.region).forward.ops]
    assert (names.count("gelu"), names.count("relu")) == (8, 1)
    with pytest.raises(UnlikeError):
        restore_units(changing.run(program))


@pytest.mark.slow
def test_padded_heads_reach_every_layer() -> None:
    """Parameters of layers that are left out get the shapes that passes give to those of the third one."""
    padded = {}
    for depth in (4, 9):
        model = stack(depth, heads=3, groups=1)
        package = partc.compile(model, {"x": torch.zeros(2, 8, 12)}, mesh="tp=2", loss=mean)
        padded[depth] = package.padded
    names = {name.partition(".")[2] for name in padded[4]}
    assert names and padded[9] == {f"{i}.{name}": padded[4][f"0.{name}"] for i in range(9) for name in names}


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()
