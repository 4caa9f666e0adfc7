"""Fused operations run as their kernels: in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from partc.codegen.kernels.fixed import FixedKernels
from partc.codegen.kernels.fused import kernel
from partc.codegen.kernels.kernel import Kernel
from partc.codegen.package import kernel_module
from partc.ir.interpreter import results_of
from partc.ir.layout import Sizes
from partc.ir.program import Graph, Op, TensorType
from partc.kernels.interpreted import patch_rounding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="virtual ranks have no GPU")
SHARED = Path(__file__).parent.parent / "partc" / "kernels"


class Kernels:
    """A folder of kernels, each loaded once."""

    def __init__(self, folder: Path) -> None:
        patch_rounding()  # as in packages
        self.folder = folder
        self.package = f"kernels_{abs(hash(folder))}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("functions.py", "scratch.py"):
            (folder / name).write_text((SHARED / name).read_text())
        self._loaded = 0
        package = ModuleType(self.package)
        package.__path__ = [str(folder)]
        sys.modules[self.package] = package

    def load(self, built: Kernel | FixedKernels) -> Any:
        """The function that launches a kernel; of several, their module."""
        return self.launches(built, self.module(built))

    @staticmethod
    def launches(built: Kernel | FixedKernels, module: ModuleType) -> Any:
        return getattr(module, built.name) if isinstance(built, Kernel) or built.alone else module

    def module(self, built: Kernel | FixedKernels) -> ModuleType:
        """A module of its own."""
        self._loaded += 1
        name = f"{self.package}.loaded_{self._loaded}"
        path = self.folder / f"loaded_{self._loaded}.py"
        path.write_text(kernel_module(built))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def run(
        self, graph: Graph, values: Mapping[str, Tensor], params: Mapping[str, TensorType], sizes: Sizes, **how: bool
    ) -> dict[str, Tensor]:
        """Every value of a graph: what is fused by its kernel, the rest by PyTorch."""
        types = {**params, **{name: value.type for name, value in graph.definitions().items()}}
        known = dict(values)
        for op in graph.ops:
            known.update(self.one(op, types, known, sizes, **how) if op.body else results_of(op, known))
        return known

    def one(
        self, op: Op, types: Mapping[str, TensorType], known: Mapping[str, Tensor], sizes: Sizes, **how: bool
    ) -> dict[str, Tensor]:
        """The results of one fused operation. `known` may hold further arguments of its kernel; others are 0."""
        built = kernel(op, types, sizes, **how)
        told = {name: torch.as_tensor(known.get(name, 0)) for name in built.numbers}
        numbers = (int(x) if name.endswith("_rank") else there(x) for name, x in told.items())
        found = self.load(built)(*(there(known[name]) for name in op.refs()), *numbers)
        made = found if isinstance(found, tuple) else (found,)
        return {value.name: x.cpu() for value, x in zip(op.results, made, strict=True)}


def there(x: Tensor) -> Tensor:
    """Where kernels run, in memory of the same layout."""
    if INTERPRETED:
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return whole.as_strided(x.size(), x.stride(), x.storage_offset())
