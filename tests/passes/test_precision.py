"""Mixed precision: casts, wide operations, and training equal to torch's autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import partc
from partc.api import compilation
from partc.compilation.options import Options
from partc.errors import PartcError
from partc.ir.gradients import arguments_with_gradients
from partc.ir.operations import RANDOM
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.package.verify import verify
from partc.passes.precision import precision
from partc.rules import is_matmul, operations, precision_of
from partc.runtime.ops.experts import expert_rows_grad
from tests.zoo import MODELS

PROGRAM = """
program net mesh dp=1,tp=1 microbatches 1 loss loss
input x
value x: f32[4, 8]
value h: f32[4, 16]
value loss: f32[]
parameter w: f32[16, 8]
parameter scale: f32[16]
parameter s: f32[]
call block = block(x; w, scale) -> h
call head = head(h; s) -> loss

region block phase microbatch:
  param w: f32[16, 8]
  param scale: f32[16]
  forward:
    input x: f32[4, 8]
    turned = permute(w, (1, 0))  # f32[8, 16]
    h = matmul(x, turned)  # f32[4, 16]
    p = softmax(h, 1)  # f32[4, 16]
    low = relu(h)  # f32[4, 16]
    y = mul(p, low)  # f32[4, 16]
    z = mul(y, scale)  # f32[4, 16]
    return z

region head phase microbatch:
  param s: f32[]
  forward:
    input h: f32[4, 16]
    t = mul(h, s)  # f32[4, 16]
    loss = sum(t, (0, 1), False)  # f32[]
    return loss
"""


def test_casts_stand_where_types_meet() -> None:
    mixed = print_program(precision(parse(PROGRAM), low="bf16"))
    assert_expected_inline(
        mixed,
        """\
program net mesh dp=1,tp=1 microbatches 1 loss loss
input x
value x: f32[4, 8]
value h: bf16[4, 16]
value loss: f32[]
parameter w: f32[16, 8]
parameter scale: f32[16]
parameter s: f32[]
call block = block(x; w, scale) -> h
call head = head(h; s) -> loss

region block phase microbatch:
  param w: bf16[16, 8]
  param scale: f32[16]
  forward:
    input x: f32[4, 8]
    turned   = permute(w, (1, 0))      # bf16[8, 16]
    x_bf16   = to(x, <bf16>)           # bf16[4, 8]
    h        = matmul(x_bf16, turned)  # bf16[4, 16]
    h_wide   = to(h, <f32>)            # f32[4, 16]
    p        = softmax(h_wide, 1)      # f32[4, 16]
    low      = relu(h)                 # bf16[4, 16]
    low_wide = to(low, <f32>)          # f32[4, 16]
    y        = mul(p, low_wide)        # f32[4, 16]
    z        = mul(y, scale)           # f32[4, 16]
    z_bf16   = to(z, <bf16>)           # bf16[4, 16]
    return z_bf16

region head phase microbatch:
  param s: f32[]
  forward:
    input h: bf16[4, 16]
    t      = mul(h, s)                   # bf16[4, 16]
    t_wide = to(t, <f32>)                # f32[4, 16]
    loss   = sum(t_wide, (0, 1), False)  # f32[]
    return loss
""",
    )
    assert print_program(parse(mixed)) == mixed


def test_biases_of_experts_are_added_in_16_bits_and_their_gradients_in_32() -> None:
    """As the bias of a linear layer is: no value of all experts' rows is wide."""
    compiled = partc.compile(
        Path(__file__).parents[1] / "models" / "moe.py", mesh="ep=2", precision="bf16", options={"batch": "4"}
    )
    layer = next(region for region in compiled.program.regions if "up" in " ".join(v.name for v in region.params))
    biases = [op for op in layer.forward.ops if op.name == "expert_rows"]
    assert biases and {op.result.type.dtype for op in biases} == {"bf16"}
    ones = torch.ones(1024, 3, dtype=torch.bfloat16)  # a sum in 16 bits would stop at 256
    found = expert_rows_grad(ones, torch.zeros(1024, dtype=torch.int64), 2)
    assert found.dtype == torch.bfloat16 and found.tolist() == [[1024.0] * 3, [0.0] * 3]


def test_an_operation_may_be_told_otherwise() -> None:
    text = print_program(precision(parse(PROGRAM), low="bf16", casts={"softmax": "low", "matmul": "high"}))
    assert "p = softmax(h_bf16, 1)" in " ".join(text.split())
    assert "param w: f32[16, 8]" in text


def test_nothing_changes_without_few_bits() -> None:
    program = parse(PROGRAM)
    assert precision(program) is program


class Contrast(nn.Module):
    """A teacher that averages weights, and a queue of its results that products read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, averaged in zip(self.up.parameters(), self.teacher.parameters(), strict=True):
                averaged.mul_(0.9).add_(own, alpha=0.1)
            key = self.teacher(x)
        similar = torch.cat([(self.up(x) * key).sum(1, keepdim=True), self.up(x) @ self.queue.clone()], 1)
        self.queue.copy_(torch.cat([key.T, self.queue[:, : -len(x)]], 1))
        return nn.functional.cross_entropy(similar, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.slow
def test_tensors_that_forward_changes_and_weights_that_it_averages_are_read_in_fp32() -> None:
    package = partc.compile(Contrast, lambda: {"x": torch.randn(8, 6)}, mesh="1", precision="bf16")
    assert package.verify(steps=2).ok
    (region,) = (region for region in package.program.regions if region.params)
    assert {value.type.dtype for value in region.params} == {"f32"}


class Views(nn.Module):
    """Two batches pass a norm whose statistics move slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.001), nn.ReLU())

    def forward(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - self.body(view)).square().mean()


@pytest.mark.slow
def test_values_without_gradients_keep_the_types_of_their_computation() -> None:
    """A running variance crosses from the first call of its norm to the second; in 16 bits it would never change."""
    batch = {"x": torch.randn(16, 6), "view": torch.randn(16, 6)}
    package = partc.compile(Views, lambda: batch, mesh="1", precision="bf16")
    program = package.program
    types = {value.name: value.type for value in program.values}
    low = {name for call in program.calls for name in call.results if types[name].dtype == "bf16"}
    live = {name for _, name, _ in arguments_with_gradients(program)}
    assert low and low <= live, low - live


PREPARED = """
program net mesh dp=1,tp=1 microbatches 1 loss loss
input x
value x: f32[4, 8]
value a: f32[4, 8]
value b: f32[4, 8]
value loss: f32[]
parameter w: f32[8, 8]
call prepared = prepared(x; ) -> a, b
call head = head(a, b; w) -> loss

region prepared phase microbatch:
  forward:
    input x: f32[4, 8]
    a = mul(x, 2.0)  # f32[4, 8]
    b = mul(x, 1000.0)  # f32[4, 8]
    return a, b

region head phase microbatch:
  param w: f32[8, 8]
  forward:
    input a: f32[4, 8]
    input b: f32[4, 8]
    h = matmul(a, w)  # f32[4, 8]
    p = matmul(b, w)  # f32[4, 8]
    turned = cos(b)  # f32[4, 8]
    y = mul(h, turned)  # f32[4, 8]
    z = mul(y, p)  # f32[4, 8]
    loss = sum(z, (0, 1), False)  # f32[]
    return loss
"""


class Tower(nn.Module):
    """A frozen network with residual sums, to which fp32 positions are added."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.up, self.places = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 8))
        self.requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x) + self.places
        for block in self.blocks:
            h = h + block(h)
        return self.head(h).square().mean()


def test_activations_of_frozen_networks_have_16_bits() -> None:
    program = partc.compile(Tower, lambda: {"x": torch.randn(16, 4, 6)}, mesh="1", precision="bf16").program
    assert {value.type.dtype for value in program.values if value.type.shape[-1:] == (8,)} == {"bf16"}


def test_values_that_all_readers_want_in_16_bits_are_cast_by_their_makers() -> None:
    program = precision(parse(PREPARED), low="bf16")
    assert [(value.name, value.type.dtype) for value in program.values[1:3]] == [("a", "bf16"), ("b", "f32")]


def test_sums_and_exponentials_are_wide() -> None:
    """As torch's autocast has them, but for norms, which sum in fp32 inside."""
    wide = {name for name in operations() if precision_of(name) == "high"}
    assert {
        "softmax",
        "log_softmax",
        "sum",
        "mean",
        "cross_entropy",
        "exp",
        "log",
        "pow",
        "cumsum",
        "var",
        "avg_pool3d",
    } <= wide
    low = {name for name in operations() if precision_of(name) == "low"}
    assert {"linear", "matmul", "conv2d", "attention", "einsum", "embedding", "layer_norm"} <= low
    assert not wide & RANDOM and precision_of("mine::unknown") == "high"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", "2x2x2", {"zero": 3, "schedule": "zero-bubble"}),
        ("gpt", "tp=2", {"zero": 1, "precision": "fp16"}),
        ("dlrm", "2x2", {}),
        pytest.param("gpt", "2x2", {"zero": 0}, marks=pytest.mark.matrix),
        pytest.param("bert", "2x2", {"zero": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", "2x2x2", {"zero": 1}, marks=pytest.mark.slow),
        pytest.param("mixtral", "2x2", {}, marks=pytest.mark.slow),
        pytest.param("vit", "2", {"zero": 1}, marks=pytest.mark.slow),
    ],
)
def test_packages_train_like_autocast(name: str, mesh: str, options: dict[str, object], tmp_path: Path) -> None:
    model = MODELS[name]
    if model.config:
        pytest.importorskip("transformers")
    given = {"precision": "bf16", "microbatches": 4, "options": model.options, **options}
    package = partc.compile(model.source(tmp_path), mesh=mesh, **given)  # type: ignore[arg-type]
    result = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert result.ok, result.worst


DEMANDING = """
import torch
from torch import nn
import torch.nn.functional as F

class Demanding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.turns = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    @torch.autocast("cpu", enabled=False)
    def distances(self, x):
        x = self.again(x.float())
        return x @ x.T / 8

    def forward(self, x):
        h = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            h = F.silu(self.again(h.float())) * h.float()
        turned = torch.view_as_complex(h.view(-1, 4, 2)) @ self.turns
        return self.last(self.distances(h) @ torch.view_as_real(turned).flatten(1))

def model():
    return Demanding()

def batch():
    return {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}

def loss(module, batch):
    return F.mse_loss(module(batch["x"]), batch["y"])
"""


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2", "tp=2"])
def test_disabled_autocasts_and_complex_numbers_compute_in_fp32(mesh: str, tmp_path: Path) -> None:
    """Both calls of the layer `again` are inside disabled autocasts. Their products are in fp32, and so are those of the
    distances and of complex numbers.
    """
    (tmp_path / "demanding.py").write_text(DEMANDING)
    package = partc.compile(tmp_path / "demanding.py", mesh=mesh, precision="bf16")
    ops = [op for region in package.program.regions for op in region.forward.ops if is_matmul(op)]
    assert sorted(op.result.type.dtype for op in ops) == ["bf16"] * 3 + ["f32"] * 7
    result = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert result.ok, result.worst


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_the_demand_of_fp32_is_printed_and_parsed(kind: str, tmp_path: Path) -> None:
    (tmp_path / "demanding.py").write_text(DEMANDING)
    how = Options.checked(mesh="1", microbatches=1, schedule="1f1b", precision=kind, seed=0, shard=())
    program = compilation(str(tmp_path / "demanding.py"), None, how, model_options={}, until="normalize").after(
        "normalize"
    )
    demanding = [op for region in program.regions for op in region.forward.ops if op.wide]
    assert bool(demanding) is (kind == "bf16")
    assert parse(print_program(program, sources=True)) == program


HIDING = """
import torch
from torch import nn
import torch.nn.functional as F

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, hide):
        scores = torch.einsum("bid,bjd->bij", self.q(x), self.k(x))
        least, hide = torch.finfo(scores.dtype).min, hide[:, None]
        number = torch.full((), least, dtype=scores.dtype)
        filled = scores.masked_fill(hide, least).view(-1, 2, 2, 4)
        weights = [filled.softmax(-1).flatten(1, 2), torch.where(hide, least, scores).softmax(-1)]
        weights += [torch.where(hide, number, scores).softmax(-1), scores.clamp(least, -least).softmax(-1)]
        best = F.pad(scores, (1, 1), value=least).unfold(2, 3, 1).amax(-1)
        return (sum(weights).relu() @ self.v(x) + best.tanh().mean(-1, keepdim=True) - x).square().mean() / 64  # fp16's loss scale is 65,536

def model():
    return Pairs()

def batch():
    return {"x": torch.randn(8, 4, 6), "hide": torch.arange(4) >= torch.arange(8)[:, None] % 4}
"""


@pytest.mark.parametrize(("kind", "mesh"), [("bf16", "dp=2"), ("fp16", "pp=2")])
def test_scores_hidden_by_the_least_number_of_their_type(kind: str, mesh: str, tmp_path: Path) -> None:
    """Rows that are hidden as a whole have equal weights, which infinities would make NaN."""
    (tmp_path / "pairs.py").write_text(HIDING)
    package = partc.compile(tmp_path / "pairs.py", mesh=mesh, precision=kind, microbatches=2)  # type: ignore[arg-type]
    result = verify(package.write(tmp_path / "build"), steps=2, virtual=True)
    assert result.ok and torch.tensor(result.losses).isfinite().all(), result.worst


SMALL = """
import torch
from torch import nn

class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)

    def forward(self, x):
        h = self.up(x)
        kept = h.relu()
        share = kept / (kept + 1e-9) + kept / kept.clamp(min=torch.finfo(h.dtype).tiny)
        return (share * h).square().mean() / 64

def model():
    return Shares()

def batch():
    return {"x": torch.cat([torch.zeros(4, 6), torch.randn(4, 6)])}
"""


def test_numbers_that_fp16_rounds_to_zero_are_added_in_fp32(tmp_path: Path) -> None:
    """Quotients of zeros stay finite, as in fp32."""
    (tmp_path / "shares.py").write_text(SMALL)
    losses = {}
    for kind in ("fp32", "fp16"):
        package = partc.compile(tmp_path / "shares.py", mesh="dp=2", precision=kind)  # type: ignore[arg-type]
        result = verify(package.write(tmp_path / kind), steps=3, virtual=True)  # torch's own fp16 divides by zero
        losses[kind] = torch.tensor(result.losses)
    assert losses["fp16"].isfinite().all()
    torch.testing.assert_close(losses["fp16"], losses["fp32"], rtol=2e-2, atol=1e-3)


LAW = """
import torch
from torch import nn

class Law(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.decay = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.tensor(0.3))

    def forward(self, t, y):
        return (self.gain * torch.exp(-self.decay * t) - y).square().mean()

def model():
    return Law()

def batch():
    return {"t": torch.rand(16), "y": torch.rand(16)}
"""


def test_the_loss_is_scaled_where_no_weight_is_read_in_fp16(tmp_path: Path) -> None:
    """Updates divide gradients by the scale; these packages did not multiply by it, and learned almost nothing."""
    (tmp_path / "law.py").write_text(LAW)
    losses = {}
    for kind in ("fp32", "fp16"):
        package = partc.compile(tmp_path / "law.py", mesh="dp=2", precision=kind)  # type: ignore[arg-type]
        text = print_program(package.program)
        assert print_program(parse(text)) == text
        arguments = ["--optimizer", "sgd", "--lr", "0.5"]
        losses[kind] = verify(package.write(tmp_path / kind), steps=6, virtual=True, arguments=arguments).losses
    torch.testing.assert_close(torch.tensor(losses["fp16"]), torch.tensor(losses["fp32"]), rtol=1e-3, atol=0)


LEARNABLE = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        labels = x[:, :4].argmax(-1)
        for block in self.blocks:
            x = block(x) + x
        return F.cross_entropy(self.head(x), labels)

def model():
    return Net()

def batch():
    return {"x": torch.randn(64, 16)}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh", "zero"), [("bf16", "2x2", 1), ("fp16", "2", 3)])
def test_the_loss_curve_is_autocasts(kind: str, mesh: str, zero: int, tmp_path: Path) -> None:
    """200 steps of AdamW on new examples each: no step further off than rounding explains, and no drift.

    A bf16 operation rounds by up to 2^-9 = 0.2% and a loss here is a dozen of them deep, averaged over 64 examples:
    1% at a step. Noise of that size averages out over 200 steps; a bias of a tenth of it would show.
    """
    (tmp_path / "net.py").write_text(LEARNABLE)
    package = partc.compile(tmp_path / "net.py", mesh=mesh, precision=kind, zero=zero, microbatches=2)
    result = verify(package.write(tmp_path / "build"), steps=200, virtual=True, arguments=["--lr", "3e-3"])
    mine, theirs = torch.tensor(result.losses), torch.tensor(result.reference_losses)
    assert theirs[-20:].mean() < 0.7 * theirs[:20].mean()
    relative = (mine - theirs) / theirs
    assert relative.abs().max() < 0.02 and relative.mean().abs() < 0.002


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "cast"),
    [("bf16", "softmax"), ("bf16", "sofmax=fp32"), ("bf16", "softmax=int8"), ("fp32", "softmax=fp32")],
)
def test_wrong_casts(precision: str, cast: str) -> None:
    with pytest.raises(PartcError) as error:
        partc.compile(nn.Linear(16, 1), {"input": torch.randn(8, 16)}, mesh="1", precision=precision, casts=[cast])
    assert error.value.code == "P0414"
