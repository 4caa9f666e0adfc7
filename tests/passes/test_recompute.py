"""Recomputation: its text, its saved values against an exhaustive search, and the operations that it must not repeat."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from partc.codegen.functions import region_code
from partc.codegen.names import region_names
from partc.compilation.options import Options
from partc.cost.saved_tensors import held_inputs, microbatches_in_flight, saved_bytes
from partc.errors import PartcError, Source
from partc.ir.parser import parse
from partc.ir.printer import print_program, print_region
from partc.ir.program import Call, Graph, Program, Ref, Region
from partc.ir.verifier import verify_program
from partc.passes.recompute import WORTH, recompute
from partc.passes.recompute.choice import SavingProblem, least_saved
from partc.passes.split import split
from partc.rules import is_cheap
from partc.schedules import SCHEDULES, compute_order
from tests.programs import op, value

PROGRAM = """
program mlp mesh tp=2 microbatches 1 loss loss
input x
value x: f32[6, 5]
value loss: f32[] partial(tp)
parameter up: f32[8@tp, 5]
parameter down: f32[4, 8@tp]
call main = main(x; up, down) -> loss

region main phase microbatch:
  param up: f32[8@tp, 5]
  param down: f32[4, 8@tp]
  forward:
    input x: f32[6, 5]
    h = linear(x, up)  # f32[6, 8@tp]
    act = gelu(h)  # f32[6, 8@tp]
    drop, drop_kept = dropout(act, 0.5, 2, 0)  # f32[6, 8@tp] ; bool[6, 8@tp]
    out_part = linear(drop, down)  # f32[6, 4] partial(tp)
    out = all_reduce(out_part, axis="tp")  # f32[6, 4]
    y = tanh(out)  # f32[6, 4]
    flat = reshape(y, (24,))  # f32[24]
    loss = sum(flat, (0,), False)  # f32[]
    return loss
  saved y, drop, drop_kept, h, x
  backward:
    input grad_loss: f32[]
    input y: f32[6, 4]
    input drop: f32[6, 8@tp]
    input drop_kept: bool[6, 8@tp]
    input h: f32[6, 8@tp]
    input x: f32[6, 5]
    grad_y = expand(grad_loss, (6, 4))  # f32[6, 4]
    grad_out = tanh_backward(grad_y, y)  # f32[6, 4]
    grad_drop = linear_grad_input(grad_out, down)  # f32[6, 8@tp]
    grad_down = linear_grad_weight(grad_out, drop)  # f32[4, 8@tp]
    grad_act = dropout_backward(grad_drop, drop_kept, 0.5)  # f32[6, 8@tp]
    grad_h = gelu_backward(grad_act, h)  # f32[6, 8@tp]
    grad_up = linear_grad_weight(grad_h, x)  # f32[8@tp, 5]
    return grad_up, grad_down
"""


@pytest.fixture
def program() -> Program:
    return parse(PROGRAM)


def _backward(program: Program) -> str:
    text = print_region(program.regions[0])
    return text[text.index("  saved") :]


def test_none_is_what_it_was(program: Program) -> None:
    assert recompute(program) == program


def _sequence(rows: int) -> Program:
    """A product of a sequence of `rows` times 4,096 that two ranks of tp gather."""
    return parse(f"""
program product mesh tp=2 microbatches 1 loss loss
input x
value x: f32[{rows}@tp, 4096]
value loss: f32[] partial(tp)
parameter up: f32[8@tp, 4096]
call main = main(x; up) -> loss

region main phase microbatch:
  param up: f32[8@tp, 4096]
  forward:
    input x: f32[{rows}@tp, 4096]
    act = gelu(x)  # f32[{rows}@tp, 4096]
    act_full = all_gather(act, dim=0, axis="tp")  # f32[{rows}, 4096]
    h = linear(act_full, up)  # f32[{rows}, 8@tp]
    loss = sum(h, (0, 1), False)  # f32[] partial(tp)
    return loss
  saved act_full
  backward:
    input grad_loss: f32[]
    input act_full: f32[{rows}, 4096]
    grad_h = expand(grad_loss, ({rows}, 4))  # f32[{rows}, 8@tp]
    grad_up = linear_grad_weight(grad_h, act_full)  # f32[8@tp, 4096]
    return grad_up
""")


def test_none_gathers_long_sequences_over_tp_again() -> None:
    assert_expected_inline(
        _backward(recompute(_sequence(2048))),
        """\
  saved act
  backward:
    input grad_loss: f32[]
    input act: f32[2048@tp, 4096]
    grad_h   = expand(grad_loss, (2048, 4))          # f32[2048, 8@tp]
    act_full = all_gather(act, dim=0, axis="tp")     # f32[2048, 4096]
    grad_up  = linear_grad_weight(grad_h, act_full)  # f32[8@tp, 4096]
    return grad_up
""",
    )


def test_none_saves_short_sequences_gathered() -> None:
    assert recompute(_sequence(512)) == _sequence(512)


def test_selective_makes_again_what_is_large_and_quickly_made(program: Program) -> None:
    assert_expected_inline(
        _backward(recompute(program, recompute="selective")),
        """\
  saved y, h, x
  backward:
    input grad_loss: f32[]
    input y: f32[6, 4]
    input h: f32[6, 8@tp]
    input x: f32[6, 5]
    grad_y          = expand(grad_loss, (6, 4))                    # f32[6, 4]
    grad_out        = tanh_backward(grad_y, y)                     # f32[6, 4]
    grad_drop       = linear_grad_input(grad_out, down)            # f32[6, 8@tp]
    act             = gelu(h)                                      # f32[6, 8@tp]
    drop, drop_kept = dropout(act, 0.5, 2, 0)                      # f32[6, 8@tp] ; bool[6, 8@tp]
    grad_down       = linear_grad_weight(grad_out, drop)           # f32[4, 8@tp]
    grad_act        = dropout_backward(grad_drop, drop_kept, 0.5)  # f32[6, 8@tp]
    grad_h          = gelu_backward(grad_act, h)                   # f32[6, 8@tp]
    grad_up         = linear_grad_weight(grad_h, x)                # f32[8@tp, 5]
    return grad_up, grad_down
""",
    )


def test_full_saves_inputs_alone(program: Program) -> None:
    assert_expected_inline(
        _backward(recompute(program, recompute="full")),
        """\
  saved x
  backward:
    input grad_loss: f32[]
    input x: f32[6, 5]
    grad_y          = expand(grad_loss, (6, 4))                    # f32[6, 4]
    h               = linear(x, up)                                # f32[6, 8@tp]
    act             = gelu(h)                                      # f32[6, 8@tp]
    drop, drop_kept = dropout(act, 0.5, 2, 0)                      # f32[6, 8@tp] ; bool[6, 8@tp]
    out_part        = linear(drop, down)                           # f32[6, 4] partial(tp)
    out             = all_reduce(out_part, axis="tp")              # f32[6, 4]
    y               = tanh(out)                                    # f32[6, 4]
    grad_out        = tanh_backward(grad_y, y)                     # f32[6, 4]
    grad_drop       = linear_grad_input(grad_out, down)            # f32[6, 8@tp]
    grad_down       = linear_grad_weight(grad_out, drop)           # f32[4, 8@tp]
    grad_act        = dropout_backward(grad_drop, drop_kept, 0.5)  # f32[6, 8@tp]
    grad_h          = gelu_backward(grad_act, h)                   # f32[6, 8@tp]
    grad_up         = linear_grad_weight(grad_h, x)                # f32[8@tp, 5]
    return grad_up, grad_down
""",
    )


def test_the_emitted_backward_draws_the_same_and_says_what_it_does_again(program: Program) -> None:
    done = recompute(program, recompute="selective").regions[0]
    code = region_code(done, program.sizes, "", "", region_names([done.name])[done.name])
    assert code.backward is not None
    lines = [text for line in code.backward.lines for text in (*(f"# {note}" for note in line.notes), line.code)]
    assert_expected_inline(
        "\n".join(lines),
        """\
grad_y = grad_loss.expand(6, 4)
grad_out = torch.ops.aten.tanh_backward.default(grad_y, saved.y)
del saved.y
grad_drop = grad_out @ p.down
# recomputed: 120 B that forward did not save
act = F.gelu(saved.h)
# drop: f32[6, 8@tp], drop_kept: bool[6, 8@tp]
drop, drop_kept = functional.dropout(act, 0.5, comm.draw(number, "6, 8@tp"))
del act
functional.linear_add_grad_weight(g.down, grad_out, drop)
del grad_out
grad_act = functional.dropout_backward(grad_drop, drop_kept, 0.5)
del grad_drop
grad_h = torch.ops.aten.gelu_backward.default(grad_act, saved.h)
del saved.h
functional.linear_add_grad_weight(g.up, grad_h, saved.x)""",
    )
    assert "number" in code.backward.passes and "comm" in code.backward.passes


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_results_are_well_formed_read_back_and_split(program: Program, kind: str) -> None:
    done = recompute(program, recompute=kind)
    verify_program(done, frozenset(), "recompute")
    assert parse(print_program(done)) == done
    halves = split(done, halves=True)
    verify_program(halves, frozenset(), "split")
    assert halves.regions[0].weight is not None


def test_constants_stand_where_they_are_needed_first(program: Program) -> None:
    """One that both graphs make is not made twice, and not behind what is made again of it."""
    region = program.regions[0]
    assert region.backward is not None
    half = op("full", (6, 4), 0.5, makes=value("half", 6, 4))
    shifted = op("add", "out", "half", makes=value("shifted", 6, 4))
    forward = list(region.forward.ops)
    forward[5:6] = [half, shifted, replace(forward[5], args=(Ref("shifted"),))]
    scaled = op("mul", "grad_y", "half", makes=value("grad_scaled", 6, 4))
    backward = (*region.backward.ops[:2], half, scaled, *region.backward.ops[2:])
    region = replace(
        region,
        forward=replace(region.forward, ops=tuple(forward)),
        backward=replace(region.backward, ops=backward, outputs=(*region.backward.outputs, "grad_scaled")),
    )
    done = recompute(replace(program, regions=(region,)), recompute="full")
    verify_program(done, frozenset(), "recompute")
    made = [item.results[0].name for graph in done.regions[0].graphs[1:] for item in graph.ops]
    assert made.count("half") == 1 and made.index("half") < made.index("shifted") < made.index("y")


def test_nothing_is_made_again_of_a_buffer_that_forward_changes(program: Program) -> None:
    """`gelu` reads the buffer before it changes: only its result can be saved."""
    region = program.regions[0]
    ops = list(region.forward.ops)
    mean = value("mean", layout="[8@tp]")
    ops[1:2] = [
        op("sub", "h", "mean", makes=value("centred", layout="[6, 8@tp]")),
        replace(ops[1], args=(Ref("centred"),)),
    ]
    region = replace(region, params=(*region.params, mean), forward=replace(region.forward, ops=tuple(ops)))
    call = replace(program.calls[0], params=("up", "down", "mean"))
    changed = replace(program, regions=(region,), calls=(call,), updates=(("mean", "next_mean"),))
    again = recompute(changed, recompute="full").regions[0]
    assert "centred" in again.saved and again.backward is not None
    assert "sub" not in [item.name for item in again.backward.ops]
    fixed = recompute(replace(changed, updates=()), recompute="full").regions[0]
    assert fixed.saved == ("x",)


def test_only_regions_of_every_microbatch_are_rewritten(program: Program) -> None:
    step = replace(program, regions=(replace(program.regions[0], phase="step"),))
    assert recompute(step, recompute="full") == step


@pytest.mark.parametrize(
    ("name", "args", "cheap"),
    [
        ("gelu", ("x",), True), ("rms_norm", ("x", (4,), "w"), True), ("matmul", ("x", "y"), True),
        ("attention_dropout", ("x", "x", "y", None), False), ("cross_entropy_rows", ("x", "y"), True),
        ("matmul", ("x", "w"), False), ("linear", ("x", "w"), False), ("convolution", ("x", "w"), False),
        ("embedding_shard", ("w", "x"), False), ("attention", ("x", "x", "y", None), False),
        ("expert_matmul", ("x", "y", "w"), False), ("all_reduce", ("x",), False), ("mylib::op", ("x",), False),
    ],
)  # fmt: skip
def test_what_is_cheap(name: str, args: tuple[object, ...], cheap: bool) -> None:
    assert is_cheap(op(name, *args, makes=value("z", 4)), {"x", "y"}) == cheap


def test_the_option_is_checked(program: Program) -> None:
    with pytest.raises(PartcError) as failure:
        Options.checked(mesh="2", microbatches=1, schedule="1f1b", precision="fp32", seed=0, shard=(), recompute="-1")
    assert failure.value.code == "P0404" and "selective" in failure.value.help
    with pytest.raises(PartcError, match="no operation or module 'gelo'") as failure:
        recompute(program, recompute="gelo")
    assert failure.value.code == "P0404" and "gelu" in failure.value.help


def test_a_modules_name_stands_for_its_operations(program: Program) -> None:
    def within(graph: Graph) -> Graph:
        places = (Source(file="m.py", line=1, module=f"blocks.0.{name}") for name in ("up", "act", "act", "down"))
        first = (replace(op, source=place) for op, place in zip(graph.ops, places, strict=False))
        return replace(graph, ops=(*first, *graph.ops[4:]))

    placed = replace(program, regions=tuple(replace(r, forward=within(r.forward)) for r in program.regions))
    by_module, by_operation = (
        recompute(placed, recompute=names).region("main").saved for names in ("act", "gelu,dropout")
    )
    assert by_module == by_operation and len(by_module) < len(placed.region("main").saved)


# -- the choice, by an exhaustive search ------------------------------------------------------------


def random_choice(rng: random.Random) -> SavingProblem:
    """A graph of few operations, some of which have two results, with numbers small enough to tie."""
    sizes: dict[str, int] = {f"in{index}": rng.randint(0, 6) for index in range(rng.randint(1, 2))}
    ops, reads, effort = [], [], []
    for index in range(rng.randint(1, 6)):
        known = list(sizes)
        results = tuple(f"v{index}_{part}" for part in range(rng.choice([1, 1, 2])))
        read = tuple(rng.sample(known, min(len(known), rng.randint(0, 2))))
        sizes |= {name: rng.randint(0, 6) for name in results}
        if rng.random() < 0.75:
            ops.append(results)
            reads.append(read)
            effort.append(rng.randint(0, 40))
    needed = tuple(rng.sample(list(sizes), rng.randint(1, min(4, len(sizes)))))
    return SavingProblem(needed=needed, bytes=sizes, ops=tuple(ops), reads=tuple(reads), effort=tuple(effort))


def outcome(choice: SavingProblem, saved: frozenset[str]) -> tuple[int, int] | None:
    """Bytes and effort of saving these, if all that is needed can then be made."""
    makers = {name: index for index, results in enumerate(choice.ops) for name in results}
    again: set[int] = set()
    todo = [name for name in choice.needed if name not in saved]
    while todo:
        name = todo.pop()
        if name not in makers:
            return None
        if makers[name] not in again:
            again.add(makers[name])
            todo += [read for read in choice.reads[makers[name]] if read not in saved]
    return sum(choice.bytes[name] for name in saved), sum(choice.effort[index] for index in again)


def _price(choice: SavingProblem, saved: frozenset[str]) -> int | None:
    """The quantity that the minimum cut minimises."""
    found = outcome(choice, saved)
    return None if found is None else WORTH * found[0] + found[1]


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    choice = random_choice(random.Random(seed))
    names = list(choice.bytes)
    subsets = itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(len(names) + 1))
    prices = [price for price in (_price(choice, frozenset(subset)) for subset in subsets) if price is not None]
    assert _price(choice, least_saved(choice, worth=WORTH)) == min(prices)


# -- bytes ------------------------------------------------------------------------------------------


def test_bytes_of_a_call_by_hand(program: Program) -> None:
    half = 6 * 8 // 2
    expected = {"none": 4 * (24 + 2 * half) + half, "selective": 4 * (24 + half), "full": 0}
    held = held_inputs(program)
    assert held == {"main": frozenset({"x"})}, "the batch is there anyway"
    for kind, size in expected.items():
        region = recompute(program, recompute=kind).regions[0]
        assert saved_bytes(region, held["main"], program.sizes) == size
        assert saved_bytes(region, frozenset(), program.sizes) == size + 4 * 30


def test_two_views_of_one_value_are_one_value(program: Program) -> None:
    region = replace(program.regions[0], saved=("y", "flat"))
    assert saved_bytes(region, frozenset(), program.sizes) == 4 * 24


def test_an_input_made_in_a_microbatch_is_saved(program: Program) -> None:
    region: Region = replace(program.regions[0], name="first")
    call: Call = replace(program.calls[0], name="first", region="first", results=("x_2",))
    second = replace(program.calls[0], args=("x_2",))
    both = replace(program, regions=(region, program.regions[0]), calls=(call, second))
    assert held_inputs(both) == {"first": frozenset({"x"}), "main": frozenset()}


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "expected"),
    [
        ("gpipe", 2, 3, [{((0, 3),)}, {((1, 3),)}]),
        ("1f1b", 2, 3, [{((0, 2),)}, {((1, 1),)}]),
        ("zero-bubble", 2, 4, [{((0, 2),)}, {((1, 2),)}]),
    ],
)
def test_what_is_in_flight(kind: str, stages: int, microbatches: int, expected: list[set[object]]) -> None:
    rows = compute_order(SCHEDULES[kind], 2, microbatches, stages)
    assert [set(microbatches_in_flight(row)) for row in rows] == expected


def test_mixes_that_others_contain_are_left_out() -> None:
    rows = compute_order(SCHEDULES["interleaved"], 2, 4, 4)
    for row in rows:
        found = microbatches_in_flight(row)
        assert found and not any(
            a != b and all(dict(b).get(stage, 0) >= count for stage, count in a) for a in found for b in found
        )
