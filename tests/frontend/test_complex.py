"""Complex numbers as pairs of real ones: each rewrite against torch's own complex arithmetic, with its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.frontend.complex_numbers import REWRITES
from partc.frontend.model_precision import computing_in
from partc.frontend.trace import trace_model
from partc.ir.interpreter import evaluate_program
from partc.ir.mesh import Mesh
from partc.package.export import export
from partc.passes.normalize import normalize
from partc.runtime.train.precision import as_real
from tests.durable import train

MODELS = Path(__file__).parents[1] / "independent" / "models"
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Numbers(nn.Module):
    """A function of complex weights z[4, 3, 6] and w[6, 5], and of real inputs x[4, 3, 6]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(4, 3, 6, dtype=torch.cdouble))
        self.w = nn.Parameter(torch.randn(6, 5, dtype=torch.cdouble))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(self.z, self.w, x)
        if not found.is_complex():
            return (found * found.sin()).sum()
        scale = torch.arange(1, found.numel() + 1, dtype=torch.float64).view(found.shape)
        return (found.real.sin() * scale + found.imag * scale.cos()).sum()


def _spectrum(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """The low modes of a spectrum times weights, written into a tensor of zeros, as Fourier neural operators do."""
    given = torch.fft.rfft(x)
    out = torch.zeros(4, 3, 4, dtype=given.dtype)
    out[:, :, :2] = given[:, :, :2] * z[:, :, :2]
    out[:, :, -1:] = torch.einsum("bsi,io->bso", z, w)[:, :, :1]
    return torch.fft.irfft(out, n=6)


def _changed(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
    out = z * x
    out.mul_(z).add_(1j, alpha=2)
    out[0] = x[0]
    out[1, :, 2:] *= 2 - 1j
    out[x > 1] = 3.0
    out.real[2].fill_(0.5)
    out[:, torch.tensor([2, 0])] = z[:, :2]
    out[3, 0].zero_()
    out.masked_fill_(x < -1, 1j)
    return out


FUNCTIONS: Mapping[str, Function] = {
    "written parts": _spectrum,
    "changes in place": _changed,
    "functions": lambda z, w, x: z.sin() * z.cos() + (z * 0.5).sinh() * (z * 0.5).cosh() * x + (z + 4).sqrt(),
    "norms": lambda z, w, x: (
        torch.linalg.vector_norm(z, dim=-1) * x[..., 0] + z.norm() + z.norm(p=1, dim=(0, 2))[:, None].sum()
    ),
    "roll": lambda z, w, x: (
        z.roll((1, 2), (0, -1)) * z.roll(5) * x + torch.fft.fftshift(z, dim=1) * torch.fft.ifftshift(z)
    ),
    "add": lambda z, w, x: torch.add(z + x, z[0], alpha=2) + (1 - 2j) + 3,
    "sub": lambda z, w, x: 1j - (z - x),
    "mul": lambda z, w, x: z * z[0] * x * (2 - 1j) * 3 * (x * 1j),
    "div": lambda z, w, x: (x + 1j) / z / (x + 3) / 2,
    "neg": lambda z, w, x: -z * x,
    "conj": lambda z, w, x: z.conj() * (1 + 1j) + z.conj().resolve_conj() * x,
    "abs": lambda z, w, x: z.abs() * x,
    "angle": lambda z, w, x: z.angle() * x,
    "exp and log": lambda z, w, x: z.exp() * (z + 4).log() * x,
    "powers": lambda z, w, x: z**3 + z.square() + z.reciprocal() + x,
    "polar": lambda z, w, x: torch.polar(x.abs(), z.real) * z,
    "complex": lambda z, w, x: torch.complex(x, z.imag) * z,
    "views of pairs": lambda z, w, x: torch.view_as_complex(torch.view_as_real(z * x).flip(-1).contiguous()) * z,
    "casts": lambda z, w, x: z * x.to(torch.complex128) + z.cfloat().cdouble(),
    "padded rows": lambda z, w, x: (
        lambda y: nn.utils.rnn.pad_sequence([y[0], y[1, :1], y[2, :2]], padding_value=2.0) * z[0, :, None]
    )(z.detach()),
    "where": lambda z, w, x: torch.where(x > 0, z, 0.0) + z.masked_fill(x < 0, 1.0),
    "matmul": lambda z, w, x: z @ w + (z[0] @ w[:, 0]).sum() + z[0].mm(w).sum(),
    "real matmul": lambda z, w, x: x.to(z.dtype) @ w,
    "linear": lambda z, w, x: nn.functional.linear(z, w.t(), w[0]) * x[..., :1],
    "einsum": lambda z, w, x: torch.einsum("bsi,io->bos", z, w) * x[:, :1, :3],
    "tensordot": lambda z, w, x: torch.tensordot(z, w, ([2], [0])) * x[..., :1],
    "outer": lambda z, w, x: torch.outer(z[0, 0], w[0]) * x[0, 0, 0],
    "sum and mean": lambda z, w, x: z.sum((0, 2)) * z.mean(1, keepdim=True).mean() * x.sum() + z.sum(),
    "cumsum": lambda z, w, x: z.cumsum(1) * x,
    "views": lambda z, w, x: z.view(4, -1).unflatten(1, (3, 2, 3)).squeeze().unsqueeze(0).flatten(1) * x.view(1, -1),
    "transposes": lambda z, w, x: z.permute(2, 0, 1).transpose(0, -1).mT * x.permute(1, 2, 0),
    "reversed dimensions": lambda z, w, x: z.T.permute(2, 1, 0) * x + w.T[0, 0],
    "adjoints": lambda z, w, x: w.mH @ w.adjoint().mH * x[0, 0, 0] + w[:5].H + torch.kron(w[:1], w[:5, :1]),
    "triangles": lambda z, w, x: (
        (w.tril() @ w.mT.triu(1)).diagonal() * x[0, 0] + torch.diag_embed(z[0, 0]).sum(0) * torch.vdot(w[0], w[1])
    ),
    "ratios": lambda z, w, x: (z * 0.5).tanh() * x + (z * 0.3).tan() + z.sigmoid(),
    "copies": lambda z, w, x: (
        z.gather(1, x.argsort(1))[:, :1].repeat_interleave(3, 1) * x + w[0, 0] * w[:, :1].mT.tile(3, 1)
    ),
    "expand": lambda z, w, x: z[:1].expand(4, -1, -1) * x,
    "slices": lambda z, w, x: z[1:, :, ::2] * x[1:, :, ::2] + z[-1, :, -1:] + z.narrow(1, 0, 1)[1:, :, :3],
    "parts": lambda z, w, x: z.split((2, 1), 1)[0] * z.chunk(2, -1)[1].repeat(1, 1, 2)[:, :2] * z.unbind(1)[0][:, None],
    "joins": lambda z, w, x: torch.cat((z, x.to(z.dtype)), -1) * torch.stack((z, z * x), -1).flatten(2),
    "picks": lambda z, w, x: z.index_select(1, torch.tensor([2, 0])) * z[:, torch.tensor([0, 1])] * x[:, :2],
    "flip": lambda z, w, x: z.flip((0, -1)) * x,
    "pad": lambda z, w, x: nn.functional.pad(z, (1, 2, 0, 1)) * nn.functional.pad(x, (1, 2, 0, 1)),
    "constants": lambda z, w, x: (
        (torch.zeros_like(z) + z.new_ones(6) * z + torch.full_like(z, 2 + 1j))
        * x
        * torch.tensor([1, 2j, 0.5, 1 - 1j, 3, 4])
        + torch.tensor(2 - 3j)
    ),
    "integers": lambda z, w, x: (torch.arange(6) * 1j * 0.1).exp() * z + torch.arange(6) / 3j * x,
    "fft": lambda z, w, x: torch.fft.fft(z) * torch.fft.ifft(x, norm="ortho"),
    "fft of a size": lambda z, w, x: torch.fft.fft(z, n=8) * torch.fft.ifft(x, n=8, norm="forward"),
    "fft of two": lambda z, w, x: torch.fft.fft2(z, dim=(0, 1)) * torch.fft.ifft2(x, s=(3, 6)),
    "fft of all": lambda z, w, x: torch.fft.fftn(z) * torch.fft.ifftn(x, dim=(0, 2)),
    "rfft": lambda z, w, x: torch.fft.rfft(x) * z[..., :4] + torch.fft.rfft(x, n=7, dim=1)[:, :1, :4],
    "irfft": lambda z, w, x: torch.fft.irfft(z) * 2 + torch.fft.irfft(z, n=9, norm="ortho")[..., :1],
    "stft": lambda z, w, x: (lambda s: s * s.conj() * (1 + 2j))(
        torch.stft(z.real.flatten(1), 6, 2, 5, torch.hann_window(5), normalized=True, return_complex=True)
    ),
    "stft of two sides": lambda z, w, x: torch.stft(z.flatten(), 8, center=False, onesided=False, return_complex=True),
    "istft": lambda z, w, x: torch.istft(z, 4, 2, 3, torch.hamming_window(3, dtype=x.dtype), normalized=True, length=9),
    "istft of two sides": lambda z, w, x: torch.istft(
        z, 3, 1, window=torch.hann_window(3, dtype=x.dtype) + 0.5, center=False, onesided=False, return_complex=True
    ),
    "rfft of two": lambda z, w, x: torch.fft.rfft2(x, norm="ortho") * z[..., :4],
    "irfft of real numbers": lambda z, w, x: (
        torch.fft.irfft(z.real)
        + torch.fft.irfft2(z.imag, s=(3, 10)).sum(1, keepdim=True)
        + torch.fft.irfftn(x * z.real, norm="forward").sum()
    ),
    "hfft": lambda z, w, x: (
        torch.fft.hfft(z)
        + torch.fft.hfft(x, norm="ortho") * torch.fft.hfft(z, n=9, norm="forward").sum(-1, keepdim=True)
    ),
    "hfft of two": lambda z, w, x: (
        torch.fft.hfft2(z, s=(3, 7)) + torch.fft.hfftn(x, s=(3, 7), dim=(1, 2), norm="ortho")
    ),
    "ihfft": lambda z, w, x: (
        torch.fft.ihfft(x * z.real) + torch.fft.ihfft2(z.imag, norm="ortho") * torch.fft.ihfftn(x, norm="forward").sum()
    ),
    "irfft of two": lambda z, w, x: torch.fft.irfft2(z, s=(3, 7)) + torch.fft.irfftn(z, s=(3, 4), dim=(1, 2)).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs_compute_what_torch_does(name: str) -> None:
    torch.manual_seed(0)
    model, x = Numbers(FUNCTIONS[name]), torch.randn(4, 3, 6, dtype=torch.float64)
    with computing_in(torch.float64):
        expected = model(x)
        expected.backward()
    program = trace_model(
        lambda: copy.deepcopy(model).to("meta"), lambda: {"x": x}, name="m", mesh=Mesh.parse("1"), precision="fp64"
    ).program
    pairs = {name: as_real(value.detach()).clone().requires_grad_() for name, value in model.named_parameters()}
    found = evaluate_program(normalize(program), {"x": x}, pairs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.backward()
    for name, value in model.named_parameters():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        mine = torch.zeros_like(pairs[name]) if pairs[name].grad is None else pairs[name].grad
        torch.testing.assert_close(mine, as_real(gradient), rtol=1e-11, atol=1e-11)


def test_other_operations_are_refused_by_name() -> None:
    for function, name in (
        (lambda z, w, x: z.asin(), "asin"),
        (lambda z, w, x: z**0.5, "pow"),
        (lambda z, w, x: torch.einsum("bsi,io,o->b", z, w, w[0]), "einsum"),
    ):
        assert name in REWRITES or name == "asin"
        with pytest.raises(PartcError, match=f"P0209.*{name}") as refusal:
            trace_model(
                lambda f=function: Numbers(f), lambda: {"x": torch.ones(4, 3, 6)}, name="m", mesh=Mesh.parse("1")
            )
        assert refusal.value.source is not None and refusal.value.source.line > 0


@pytest.mark.slow
def test_an_export_has_the_model_s_own_complex_numbers(tmp_path: Path) -> None:
    """fp32 ones under their own dtype; a training starts from the file."""
    build = partc.compile(str(MODELS / "complex_layers.py"), mesh="dp=2").write(tmp_path / "build")
    first = train(build, "--steps", "1", "--save", str(tmp_path / "ckpt"))
    assert not first.returncode, first.stderr
    end = tmp_path / "end.safetensors"
    export(build, tmp_path / "ckpt", end, say=lambda line: None)
    state = load_file(end)
    assert state["first"].dtype == torch.complex64 and tuple(state["first"].shape) == (6, 10)
    again = train(build, "--steps", "1", "--lr", "0", "--init", str(end), "--save", str(tmp_path / "more"))
    assert not again.returncode, again.stderr
    export(build, tmp_path / "more", tmp_path / "same.safetensors", say=lambda line: None)
    same = load_file(tmp_path / "same.safetensors")
    assert all(torch.equal(x, same[name]) for name, x in state.items())
