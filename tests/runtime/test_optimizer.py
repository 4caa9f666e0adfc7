"""Optimizers equal torch's on tensors of several dtypes, and import little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partc.runtime.errors import UsageError
from partc.runtime.optimizer.optimizer import attach_gradients, make_optimizers
from partc.runtime.optimizer.recipe import Recipe, UpdateRule


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_steps_as_torch(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = {"a": torch.randn(5, 3, dtype=dtype), "b": torch.randn(4, dtype=dtype), "buffer": torch.randn(2)}
    plain = [values[key].clone().requires_grad_() for key in ("a", "b")]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    theirs = kind(plain, lr=0.1)
    gradients = {key: torch.zeros_like(values[key]) for key in ("a", "b")}
    trained = attach_gradients(values, gradients)
    ((_, mine, _),) = make_optimizers(dict.fromkeys(trained, UpdateRule(name=name)), trained, 0.1)
    assert len(trained) == 2
    for _ in range(4):
        for gradient, parameter in zip(gradients.values(), plain, strict=True):
            gradient.copy_(torch.randn_like(gradient))
            parameter.grad = gradient.clone()
        with torch.no_grad():
            mine.step()
        theirs.step()
    for parameter, key in zip(plain, ("a", "b"), strict=True):
        torch.testing.assert_close(values[key], parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_compiler_is_not_imported() -> None:
    program = (
        "import sys, torch; from partc.runtime.optimizer.optimizer import make_optimizers\n"
        "from partc.runtime.optimizer.recipe import UpdateRule\n"
        "x = torch.ones(3); x.grad = torch.ones(3)\n"
        "with torch.no_grad(): next(make_optimizers({'x': UpdateRule(name='adamw')}, {'x': x}, 0.1))[1].step()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"adamw.*sgd"):
        Recipe.of("lamb")
