"""Compressed gradients that kernels encode and decode equal PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import partc
from partc.codegen.kernels.fixed import FixedKernels
from partc.runtime.comm.compression import BLOCK, TorchCodec, room
from tests.passes.test_zero import tied
from tests.triton_runs import Kernels, interpreted, there


@pytest.fixture(scope="module", params=["bf16", "int8"])
def codecs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TorchCodec]:
    built = FixedKernels(name=request.param, interpreted=1024, alone=False)
    return Kernels(tmp_path_factory.mktemp("kernels")).load(built), TorchCodec(request.param)


def drawn(ways: int, size: int) -> Tensor:
    x = (
        torch.randn(ways, size, generator=torch.Generator().manual_seed(size))
        * torch.logspace(-8, 3, max(size, 1))[:size]
    )
    if size > 2 * BLOCK:
        x[0, :BLOCK] = 0
        x[-1, BLOCK : BLOCK + 4] = torch.tensor([0.5, 1.5, -2.5, 127.0])  # halves go to the even
        x[-1, BLOCK + 4 : 2 * BLOCK] = 0
    return x


@pytest.mark.parametrize(("ways", "size"), [(1, 1), (2, 255), (3, 256), (1, 257), (4, 2000), (2, 3 * 1024), (3, 0)])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_same_bits(codecs: tuple[Any, TorchCodec], ways: int, size: int, scale: float) -> None:
    kernels, plain = codecs
    x, left = drawn(ways, size), drawn(ways, size) / 300
    for before in (None, left):
        right, right_left = plain.encode(x, before, scale)
        given = None if before is None else there(before.clone())
        coded, rest = kernels.encode(there(x), given, scale)
        whole, total = kernels.decode(coded, size), kernels.decode_sum(coded, size)
        assert given is None or rest is given
        assert coded.shape == (ways, room(plain.kind, size)) == right.shape and coded.dtype == right.dtype
        assert torch.equal(coded.cpu(), right) and torch.equal(rest.cpu(), right_left)
        assert torch.equal(whole.cpu(), plain.decode(right, size))
        torch.testing.assert_close(total.cpu(), plain.decode_sum(right, size))


@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_is_seen_and_leaves_nothing(codecs: tuple[Any, TorchCodec], broken: float) -> None:
    kernels, plain = codecs
    x = drawn(2, 700)
    x[1, 300] = broken
    coded, left = kernels.encode(there(x), None, 1.0)
    found = kernels.decode(coded, 700).cpu()
    assert left.isfinite().all() and left[1, 300] == 0
    right = plain.decode(plain.encode(x, None, 1.0)[0], 700)
    assert torch.equal(found.isfinite(), right.isfinite()) and not found.isfinite().all()


@pytest.mark.slow
@interpreted
def test_packages_send_with_them() -> None:
    """In less memory: what was left out is written over, and nothing is padded or converted apart."""
    batch = {"ids": torch.randint(16, (8, 4))}
    packages = [
        partc.compile(tied, batch, mesh="1x4x1", nodes=2, compress_grads="int8", kernels=kernels)
        for kernels in ("triton", "aten")
    ]
    texts = [dict(package.files())["stages/stage_0.py"] for package in packages]
    assert "compress=kernels.int8)" in texts[0] and 'compress="int8")' in texts[1]
    peaks = [package.memory.worst.peak for package in packages if package.memory is not None]
    assert peaks[0] < peaks[1]
    result = packages[0].verify(steps=2, virtual=True)
    assert result.ok, result.worst
