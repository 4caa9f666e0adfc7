"""Branches on values: constants are known, guards are assumed, and others are refused at their line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partc
from partc import passes
from partc.errors import PartcError
from partc.frontend.branches.known_values import LARGEST, KnownValues
from partc.frontend.capture import capture
from partc.frontend.trace import Traced, trace_model
from partc.frontend.traceable_forms.functions import gaussian_nll_loss, multi_margin_loss, multilabel_margin_loss
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from tests.guards import asserting, by_number, elsewhere, raising, reported
from tests.independent.plain import double

GUARDS = pytest.mark.skipif(sys.version_info < (3, 11), reason="guards are found by the columns of instructions")
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.layer, self.words, self.step = nn.Linear(8, 8), nn.Embedding(10, 8), step

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.step(self, x, y)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8), "y": torch.randint(8, (8,))}


def traced(step: Step) -> Traced:
    return trace_model(lambda: Net(step), batch, name="net", mesh=Mesh.parse("1"), precision="fp64")


@GUARDS
@pytest.mark.parametrize("step", [raising, asserting, elsewhere, by_number, reported])
def test_a_test_that_only_raises_is_assumed_and_listed(step: Step) -> None:
    found = traced(step)
    assert len(found.assumed) == 1
    line = step.__code__.co_firstlineno + 1
    assert f"guards.py:{line})" in found.assumed[0]


def placed(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    table = net.words.weight[:, 0].detach()
    place = (table == table[y[0]]).nonzero().item()
    return net.layer(x).square().mean() + table[[place, 0]].sum()


def test_one_element_is_assumed_where_the_place_of_the_only_one_is_read() -> None:
    line = placed.__code__.co_firstlineno + 2
    said = f"Packages do not run the guard `nonzero() finds one element` ({Path(__file__).name}:{line})."
    assert [sentence.replace(str(Path(__file__).parent) + "/", "") for sentence in traced(placed).assumed] == [said]


def renaming(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    try:
        return raising(net, x, y)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"in {type(net)}: {error}") from error


@GUARDS
def test_a_handler_that_ends_with_an_exception_catches_none() -> None:
    (found,) = traced(renaming).assumed
    assert "guards.py" in found


def test_transformers_reads_constants() -> None:
    """Positions that count up are one sequence; in a trace without values they would be several, with a mask."""
    masks = pytest.importorskip("transformers.masking_utils")

    def step(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return net.layer(x).mean() if masks.find_packed_sequence_indices(torch.arange(8)[None]) is None else x.mean()  # type: ignore[operator]

    assert "linear" in {op.name for op in traced(step).program.regions[0].forward.ops}


def gridded(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Sizes and places that come from constants: pictures of 2 x 2 and 1 x 4 patches, whose rows are counted."""
    grids = torch.tensor([[2, 2], [1, 4]])
    counts = grids[:, 0] * grids[:, 1]
    ends = counts.cumsum(0)
    within = torch.arange(counts.sum()) - torch.repeat_interleave(ends - counts, counts)
    out = net.layer(x)
    first, second = out[: ends[0]], out.narrow(0, ends[0], counts[1])
    return (first * second).sum() / len(within) + x.new_zeros(counts[0], 8).add(first).mean()


def test_sizes_and_places_of_constants_are_numbers() -> None:
    net, entries = Net(gridded).double(), {name: double(x) for name, x in batch().items()}
    program = passes.run(traced(gridded).program, {}, until="normalize")[-1].program
    torch.testing.assert_close(evaluate_program(program, entries, dict(net.named_parameters())), net(**entries))


@GUARDS
def test_guards_inside_functions_of_torch_are_assumed() -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # torch.compile unsets it for the process
    found = traced(lambda net, x, y: torch.distributions.Normal(net.layer(x), x.square() + 0.1).log_prob(x).sum())
    assert len(found.assumed) == 2 and all("torch/distributions/distribution.py" in each for each in found.assumed)


@pytest.mark.parametrize(
    "lookup",
    [
        lambda h, i: h.take(i * 8),
        lambda h, i: h.index_select(dim=0, index=i.clamp(min=0)),
        lambda h, i: h.gather(0, i[:, None].clamp(min=0)),
        lambda h, i: h[None, ..., i.flatten(), 1:],
    ],
)
def test_constant_places_outside_of_a_tensor_are_refused(lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As they may be in a part of the batch. The trace itself does not check them."""
    traced(lambda net, x, y: lookup(net.layer(x), torch.arange(-8, 8, 15)).sum())
    with pytest.raises(PartcError, match=rf"{Path(__file__).name}.*index (8|64) is out of bounds for size (8|64)"):
        traced(lambda net, x, y: lookup(net.layer(x), torch.arange(0, 9, 8)).sum())


def unchecked(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = net.layer(x)
    many = F.multilabel_margin_loss(z, y[:, None].expand(8, 8))
    return many + F.gaussian_nll_loss(z, x, z.exp()) + nn.GaussianNLLLoss()(z, x, x.exp()) + F.multi_margin_loss(z, y)


def test_checks_of_replaced_functions_are_assumed() -> None:
    many, variances = traced(unchecked).assumed
    line = unchecked.__code__.co_firstlineno
    assert "`target >= -1`" in many and f"{Path(__file__).name}:{line + 2})" in many
    assert "`var >= 0`" in variances and f"{Path(__file__).name}:{line + 3})" in variances
    with pytest.raises(PartcError, match="negative"):
        traced(lambda net, x, y: F.gaussian_nll_loss(net.layer(x), x, -0.5))


def clamped(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = net.layer(x)
    if not torch.isfinite(x).all():
        x = x.clamp(-9, 9)
    return x.sum() if not (x.isnan().any() or torch.isinf(x).any().item()) else x.mean()


class Jittered(nn.Module):
    """A matrix whose diagonal grows until it is positive definite, which needs `tries` steps."""

    def __init__(self, tries: int) -> None:
        super().__init__()
        self.layer, self.tries = nn.Linear(8, 4), tries

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        return self.factor(h @ h.mT + (0.5 - self.tries) * torch.eye(len(h), dtype=h.dtype)).diagonal().log().sum()

    def factor(self, a: Tensor) -> Tensor:
        lower, failed = torch.linalg.cholesky_ex(a)
        if not torch.any(failed):
            return lower
        for _ in range(2):
            a = a + torch.eye(len(a), dtype=a.dtype)
            lower, failed = torch.linalg.cholesky_ex(a)
            if not torch.any(failed):
                return lower
        raise ValueError("not positive definite")


@pytest.mark.parametrize("tries", [0, 1, 2])
def test_forward_may_raise_behind_the_first_outcomes_of_all_tests(tries: int) -> None:
    torch.manual_seed(0)
    found = partc.compile(Jittered(tries), batch(), mesh="tp=2", precision="fp64").verify(steps=2)
    assert found.ok, found.worst


def test_numbers_are_assumed_to_be_finite() -> None:
    found = traced(clamped)
    assert len(found.assumed) == 3 and "isfinite(x).all()" in found.assumed[0]
    assert not {"clamp", "mean"} & {op.name for op in found.program.regions[0].forward.ops}


class Strided(nn.Module):
    """Sizes in buffers that no state dict has; `count` is one that forward changes."""

    def __init__(self, step: Callable[[Strided, Tensor], Tensor]) -> None:
        super().__init__()
        kernel, stride = torch.tensor(5), torch.tensor(2)
        self.layer, self.step = nn.Linear(8, 8), step
        self.pad = nn.Buffer(kernel - stride, persistent=False)
        self.count = nn.Buffer(torch.tensor(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


class Contrastive(nn.Module):
    """Similarities that masks of the constructor select: a plain attribute and a buffer outside of state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, others = nn.Linear(8, 8), torch.ones(8, 8, dtype=torch.bool).fill_diagonal_(0)
        for i in range(4):
            others[i, i + 4] = others[i + 4, i] = False
        self.others = others
        self.rest = nn.Buffer(~torch.eye(8, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        near = self.layer(x) @ x.T
        return near[self.others].reshape(8, -1).logsumexp(1).mean() + near[self.rest].view(8, 7).square().mean()


def test_masks_of_the_constructor_select() -> None:
    net, entries = Contrastive().double(), {name: double(x) for name, x in batch().items()}
    found = trace_model(Contrastive, batch, name="net", mesh=Mesh.parse("1"), precision="fp64")
    program = passes.run(found.program, {}, until="normalize")[-1].program
    held = {**dict(net.named_parameters()), "others": net.others, "rest": net.rest}
    torch.testing.assert_close(evaluate_program(program, entries, held), net(**entries), rtol=1e-12, atol=1e-12)


def counting_up(net: Strided, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x).sum() * net.count


def branching(net: Strided, x: Tensor) -> Tensor:
    net.count = net.count + 1
    return net.layer(x).sum() if net.count > 1 else net.layer(x).mean()


def test_sizes_in_buffers_are_known_unless_forward_changes_them() -> None:
    def pad(net: Strided, x: Tensor) -> Tensor:
        return F.pad(net.layer(x), (0, net.pad)).sin().sum()

    def traced(step: Callable[[Strided, Tensor], Tensor]) -> Traced:
        given = {"x": torch.randn(8, 8)}
        return trace_model(lambda: Strided(step), lambda: given, name="net", mesh=Mesh.parse("1"), precision="fp64")

    padded = next(op for op in traced(pad).program.regions[0].forward.ops if op.name == "pad")
    assert padded.result.type.shape == (8, 11)
    assert "mul" in {op.name for op in traced(counting_up).program.regions[0].forward.ops}
    assert "where" in {op.name for op in traced(branching).program.regions[0].forward.ops}


def test_equal_layers_with_other_sizes_in_buffers_are_each_traced() -> None:
    class Cut(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layer, self.count = nn.Linear(8, 8), nn.Buffer(torch.tensor(count), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.pad(self.layer(x)[:, self.count :], (self.count, 0)).sin()

    build = lambda: nn.Sequential(*map(Cut, (1, 1, 1, 2, 3, 1, 1)))  # noqa: E731
    net, x = build().double(), torch.randn(8, 8, dtype=torch.float64)
    loss = lambda model, batch: model(batch["x"]).sum()  # noqa: E731
    traced = trace_model(build, lambda: {"x": x}, loss, name="net", mesh=Mesh.parse("1"), precision="fp64")
    program = passes.run(traced.program, {}, until="normalize")[-1].program
    held = dict(net.named_parameters()) | dict(net.named_buffers())
    torch.testing.assert_close(evaluate_program(program, {"x": x}, held), net(x).sum())


class Cached(nn.Module):
    """Forward keeps what it computes from sizes in a buffer that no state dict has."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), scale
        self.places = nn.Buffer(torch.zeros(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[1] != x.shape[1]:
            self.places = torch.arange(x.shape[1])[None].to(x.dtype) / 2
            if self.scale:
                self.places = self.places * x.mean()
        return (self.layer(x) * self.places).sum()


def test_a_buffer_that_caches_a_constant_gets_its_shape_in_forward() -> None:
    net, x = Cached().double(), torch.randn(8, 8, dtype=torch.float64)
    found = trace_model(Cached, lambda: {"x": x}, name="net", mesh=Mesh.parse("1"), precision="fp64")
    program = passes.run(found.program, {}, until="normalize")[-1].program
    held = dict(net.named_parameters()) | dict(net.named_buffers())
    torch.testing.assert_close(evaluate_program(program, {"x": x}, held), net(x))
    with pytest.raises(PartcError, match=r"forward changes self.places of Cached"):
        trace_model(lambda: Cached(scale=True), lambda: {"x": x}, name="net", mesh=Mesh.parse("1"))


def told(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = y > 3
    text = f"{rows.sum()} rows, {rows.sum():4d}"
    return net.layer(x)[rows].sum() + 0 * len(text[:1])


def test_numbers_of_selected_rows_are_written_in_messages() -> None:
    traced(told)


def alternatives(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Where the branches are not taken, their results or gradients are not finite."""
    z = net.layer(x)
    size = (z - z.detach()).square().sum()
    if size > 0:
        z = z / size.sqrt()
    loss = z.square().mean()
    rows, none = y > 3, y > 90
    if none.any():
        loss = loss + z[none].mean().log()
    return loss + F.cross_entropy(net.words(y[rows]), y[rows]) if rows.sum() > 0 else loss * 0.0


def labelled(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One outcome selects rows, the other has a constant."""
    z, rows = net.layer(x), (y > 3).nonzero()
    if rows.size(0) > 0:
        return F.cross_entropy(z.gather(0, rows.expand(rows.size(0), z.size(1))), y.gather(0, rows.view(-1)))
    return z.sum() * torch.tensor(3).to(z)


def in_each_layer(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(9):
        if x.abs().max() > 1.5:
            x = x / x.abs().max()
        x = x + net.layer(x).tanh()
    return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("step", [alternatives, labelled, in_each_layer])
@pytest.mark.parametrize("label", [-1, 0])
def test_both_outcomes_of_branches_on_values_are_in_the_package(step: Step, label: int) -> None:
    entries = batch()
    if label >= 0:
        entries["y"] = torch.full_like(entries["y"], label)
    found = partc.compile(Net(step), entries, mesh="dp=2", precision="fp64").verify(steps=2)
    assert found.ok, str(found.worst)


def looping(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y = net.layer(x)
    while y.mean() > 1:
        y = y / 2
    return y.sum()


def remembered(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y = net.layer(x)
    if x.mean() > 0:
        net.positive = True  # type: ignore[assignment]
    return y.sum() if hasattr(net, "positive") else y.mean()


@pytest.mark.parametrize(("step", "line"), [(looping, 2), (remembered, 2)])
def test_other_choices_by_values_are_refused_at_their_line(step: Step, line: int) -> None:
    with pytest.raises(PartcError) as error:
        traced(step)
    assert error.value.code == "P0206"
    assert error.value.source is not None and error.value.source.line == step.__code__.co_firstlineno + line


def constant(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(4, 4).tril()
    mask[3:, 0] = 0
    views = mask.view(-1)
    if mask.all() or torch.zeros_like(y).any().item() or views[0] != 1 or int(mask.sum()) != 9:
        return x.sum()
    return net.layer(x).sum() * float(mask.sum())


def drawn(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    skipped = net.training and torch.rand(()) < 0.0
    skipped = skipped or torch.empty(1).uniform_(2.0, 3.0).item() < 2
    x = [x][int(torch.empty(1).uniform_(0.0, 1.0).item())]
    return x.sum() if skipped else net.layer(x).sum()


def overwritten(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros(8)
    kept.view(2, 4).copy_(x[0].view(2, 4))
    if kept.any():
        return x.sum()
    return net.layer(x).sum()


def single(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A constant of no dimension, in the shape of a value that is not known."""
    zero = torch.zeros_like(net.layer(x).sum())
    return net.layer(x).sum() if not zero.any() else x.sum()


@pytest.mark.parametrize("step", [constant, drawn, single])
def test_constants_have_values_while_a_model_is_traced(step: Step) -> None:
    found = traced(step)
    assert not found.assumed
    assert any(op.name == "linear" for op in found.program.regions[0].forward.ops)


def sized_by_constants(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = net.layer(x).repeat_interleave(torch.tensor([0, 3, 1, 0, 1, 1, 1, 2]), dim=1)
    left, right = x.tensor_split(torch.tensor([3]), dim=1)
    pairs = torch.combinations(torch.arange(4), 2)
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(3, generator=generator)
    assert (left.shape[1], right.shape[1], len(pairs)) == (3, 6, 6) and sorted(places.tolist()) == [0, 1, 2]
    right = right.permute(*torch.tensor([1, 0])).transpose(*torch.arange(2))
    marked = right @ F.one_hot(input=torch.arange(6) % 3).to(x.dtype)
    drawn = torch.empty(3).normal_(generator=generator)
    return (left[:, places] * drawn + marked.sin()).sum() + right[:, pairs[:, 1]].sum()


@pytest.mark.slow
def test_sizes_and_numbers_of_constants() -> None:
    torch.manual_seed(0)
    package = partc.compile(Net(sized_by_constants), batch(), mesh="dp=2", precision="fp64")
    assert package.verify(steps=2).ok and not package.replicated_ops


CONSTRUCTORS: dict[str, Callable[[list[int]], Tensor]] = {
    "LongTensor": lambda numbers: torch.LongTensor(numbers),
    "Tensor": lambda numbers: torch.Tensor(numbers).long(),
    "from_numpy": lambda numbers: torch.from_numpy(np.array(numbers)),
    "of an array": lambda numbers: torch.LongTensor(np.array(numbers)),
    "new": lambda numbers: torch.ones(1).new(numbers).long(),
}


class Streaming(nn.Module):
    """The mask of chunks in which streaming transducers, such as Phi-4's audio encoder, attend."""

    def __init__(self, constructor: str) -> None:
        super().__init__()
        self.layer, self.constructor = nn.Linear(8, 8), constructor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        starts = F.pad(CONSTRUCTORS[self.constructor]([3, 6]), (1, 0))
        place = torch.arange(8)[:, None]
        chunk = ((place < F.pad(starts[1:], (0, 1), value=8)) & (place >= starts)).nonzero()[:, 1] - 1
        chunk[chunk < 0] = 0
        assert chunk.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
        seen = torch.arange(8) >= starts[chunk][:, None]
        hidden = self.layer(x)
        return hidden.masked_fill(~seen[0], 0.0).square().mean() + (hidden @ seen.to(x.dtype)).sin().sum()


@pytest.mark.slow
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_tensors_by_constructors_have_values_while_a_model_is_traced(constructor: str) -> None:
    torch.manual_seed(0)
    assert partc.compile(Streaming(constructor), batch(), mesh="dp=2,tp=2", precision="fp64").verify(steps=2).ok


def test_values_of_large_constants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of all pairs of positions would take time and memory by the square of the length."""
    computed = KnownValues.computed
    sizes: list[int] = []

    def noted(self: KnownValues, *args: Any) -> Any:
        found = computed(self, *args)
        sizes.append(found.numel() if isinstance(found, Tensor) else 0)
        return found

    def step(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(4096)
        mask = places[:, None] >= places
        return net.layer(x).sum() * mask.sum()

    monkeypatch.setattr(KnownValues, "computed", noted)
    traced(step)
    assert 4096 in sizes and max(sizes) <= LARGEST


def test_values_of_constants_are_computed_beside_the_graph() -> None:
    """Each switch of gradients in the graph becomes a graph of its own, which makes traces slow."""
    graph = capture(lambda: Net(constant), batch, None, precision="fp64").exported.graph
    assert not [node for node in graph.nodes if "set_grad" in str(node.target)]


def follows_both_ways(step: Step, *batches: dict[str, Tensor]) -> None:
    """The traced program computes the loss of eager code for every batch."""
    torch.manual_seed(0)
    net = Net(step).double()
    program = passes.run(traced(step).program, {}, until="normalize")[-1].program
    losses = []
    for entries in ({name: double(x) for name, x in each.items()} for each in batches):
        found = evaluate_program(program, entries, dict(net.named_parameters()))
        torch.testing.assert_close(found, net(**entries), rtol=1e-12, atol=1e-12)
        losses.append(found.item())
    assert len({*losses}) == len(batches)


def test_a_constant_that_takes_values_of_the_batch_is_none() -> None:
    some, y = torch.randn(8, 8), torch.arange(8)
    follows_both_ways(overwritten, {"x": some, "y": y}, {"x": some * (y[:, None] > 0), "y": y})


def chain(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One test decides which others are reached, and how often a layer runs."""
    h, total = net.layer(x), x.sum()
    if total > 9:
        return h.square().mean()
    if total > 5:
        h = net.layer(h.sin())
        if x[0, 0] > 0.3:
            h = h * x
    elif total > 3:
        h = h[:4] if x[0, 0] > 0 else h.cos()
    kept = [h.mean()]
    if x[1, 1] > 0:
        kept.append(h.abs().mean())
    return sum(kept) / len(kept)


@pytest.mark.slow
def test_branches_within_branches() -> None:
    def of(total: float, first: float, second: float) -> dict[str, Tensor]:
        x = torch.linspace(-1, 1, 64).reshape(8, 8)
        x[0, 0], x[1, 1], x[7, 7] = first, second, 0.0
        x[7, 7] = total - x.sum()
        return {"x": x, "y": torch.arange(8)}

    cases = [
        (10.0, 0.5, 1.0),
        *((total, first, second) for total in (6, 4, 1) for first in (0.5, -1.0) for second in (1, -1)),
    ]
    follows_both_ways(chain, *(of(*case) for case in cases))


def skipping(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A sum to which each of three turns may add."""
    total = torch.zeros_like(x)
    for turn in range(3):
        if x[turn].mean() < 0:
            continue
        total = total + net.layer(x * (turn + 1))
    return total.sin().mean()


@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, -1, -1), (1, -1, 1), (-1, 1, -1)])
def test_turns_that_are_left_out_add_nothing(signs: tuple[int, ...]) -> None:
    x = torch.linspace(0.1, 1, 64).reshape(8, 8)
    x[:3] *= torch.tensor(signs)[:, None]
    follows_both_ways(skipping, {"x": x, "y": torch.arange(8)})


def aliased(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Changes behind a branch of memory that one outcome passes on."""
    h = net.layer(x).clone()
    rows = h[:4]
    if x.sum() > 0:
        z = rows
        h[4:] = 0.5
    else:
        z = net.layer(rows)
    if x[0, 0] > 0:
        z = z + 1 if x[0, 1] > 0 else z * x[:4]
    h.mul_(3.0)
    return z.square().mean() + h.sin().mean()


def view_kept(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net.layer(x).clone()
    z = h[:4]
    if x[0, 0] > 0:
        z = z + 1
    h.mul_(3.0)
    return z.square().mean() + h.sin().mean()


def view_changed(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net.layer(x).clone()
    z = h[:4]
    if x[0, 0] > 0:
        z = z + 1
    z.mul_(3.0)
    return z.square().mean() + h.sin().mean()


def view_within(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net.layer(x).clone()
    z = h[:4]
    if x[0, 0] > 0:
        h.mul_(3.0)
        z = z.sin() + h[4:]
    return z.square().mean() + h.sin().mean()


@pytest.mark.parametrize("step", [aliased, view_kept, view_changed, view_within])
def test_changes_of_memory_that_one_outcome_passes_on(step: Step) -> None:
    def of(*signs: float) -> dict[str, Tensor]:
        x = torch.linspace(0.5, 1, 64).reshape(8, 8) * signs[0]
        x[0, 0], x[0, 1] = signs[1], signs[2]
        return {"x": x, "y": torch.arange(8)}

    cases = [(a, b, c) for a in (1.0, -1.0) for b, c in ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0))]
    follows_both_ways(step, *(of(*case) for case in cases))


def raising_behind(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net.layer(x)
    terms = []
    if x[0, 0] > 0:
        terms.append(h.mean())
    if x[0, 1] > 0:
        terms.append(h.square().mean())
    return torch.stack(terms).mean()


@pytest.mark.slow
def test_an_outcome_behind_which_forward_raises_is_listed() -> None:
    assert any("forward raises" in each for each in traced(raising_behind).assumed)
    cases = [(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0)]
    follows_both_ways(raising_behind, *({"x": torch.tensor([[*case] * 4] * 8), "y": torch.arange(8)} for case in cases))


def unlucky(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net.layer(x)
    if torch.rand([]) >= 0.5:
        raise ValueError("no luck")
    return h.square().mean()


def unlucky_within(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return unlucky(net, x, y) if x[0, 0] > 0 else net.layer(x).sin().mean()


def raising_in_torch(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net.layer(x)
    return h.view(7, 9).mean() if torch.rand([]) >= 0.5 else h.mean()


def three_rows(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Raises in the trace, in which all rows stand for the selected ones."""
    h = net.layer(x)
    return h[x[:, 1] > 0].view(3, 8).mean() if x[0, 0] > 0 else h.mean()


def masked_in_traces(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mask that does not fit, and which a library only makes in traces."""
    h = net.layer(x)
    if not torch.compiler.is_compiling():
        assert numpy.isfinite(h.detach().numpy()).all()
    if x[0, 0] > 0:
        h = h + torch.zeros(9, 8) if torch.compiler.is_compiling() else h.sin()
    return h.mean()


@pytest.mark.parametrize("step", [unlucky, unlucky_within, raising_in_torch, three_rows, masked_in_traces])
def test_an_outcome_that_steps_have_is_not_left_out_because_forward_raises(step: Step) -> None:
    with pytest.raises(PartcError, match="does not trace") as found:
        traced(step)
    assert found.value.code == "P0206"


def looked_up(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h, i = net.layer(x), x.sum().abs().long() % 4
    best = h[0].argmax()
    parts = h[:, best], h[y, best], h[..., None, i - 4, None], h.view(2, 4, 8)[i % 2, 1:, best], h.t()[best]
    return sum((part * part).sum() for part in parts)


def test_numbers_of_an_index_may_be_values() -> None:
    net, entries = Net(looked_up).double(), {name: double(x) for name, x in batch().items()}
    program = passes.run(traced(looked_up).program, {}, until="normalize")[-1].program
    made = evaluate_program(program, entries, dict(net.named_parameters()))
    torch.testing.assert_close(made, net(**entries), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_behind_the_first_negative_one_do_not_count(reduction: str) -> None:
    scores = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor(
        [[3, 0, -1, 2, 2, 2], [-1] * 6, [0, 1, 2, 3, 4, 5], [5, 5, -1, -1, -1, -1], [1, -1, 1, -1, 4, 0]]
    )
    losses = [each(scores, labels, reduction=reduction) for each in (multilabel_margin_loss, F.multilabel_margin_loss)]
    _equal_with_gradients(losses, [scores])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("p", [1, 2])
def test_scores_at_the_margin_have_no_gradient(p: int, reduction: str) -> None:
    scores = torch.randint(-1, 3, (9, 4)).double().requires_grad_()
    labels, weight = torch.randint(4, (9,)), torch.rand(4).double()
    losses = [
        each(scores, labels, p, 1.0, weight, reduction=reduction) for each in (multi_margin_loss, F.multi_margin_loss)
    ]
    _equal_with_gradients(losses, [scores])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 1), (5,)])
def test_clamped_variances_have_gradients(shape: tuple[int, ...], reduction: str) -> None:
    x, variance = (torch.rand(each).double().requires_grad_() for each in ((5, 4), shape))
    losses = [
        each(x, x.detach().flip(0), variance, full=True, eps=0.5, reduction=reduction)
        for each in (gaussian_nll_loss, F.gaussian_nll_loss)
    ]
    _equal_with_gradients(losses, [x, variance])


def _equal_with_gradients(losses: list[Tensor], of: list[Tensor]) -> None:
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    made, right = (torch.autograd.grad(loss.square().sum(), of) for loss in losses)
    torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)


class Distributions(nn.Module):
    """Arguments of torch.distributions are validated by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        normal = torch.distributions.Normal(self.layer(x), F.softplus(self.layer(x)))
        words = torch.distributions.Categorical(logits=self.layer(x))
        return -normal.log_prob(x).mean() - words.log_prob(y).mean() - words.entropy().mean()


@pytest.mark.slow
@GUARDS
def test_validated_distributions_equal_the_single_device(tmp_path: Path) -> None:
    package = partc.compile(Distributions, batch(), mesh="dp=2,tp=2", precision="fp64")
    assert any("torch/distributions/distribution.py" in warning for warning in package.warnings)
    assert package.verify(steps=2).ok
