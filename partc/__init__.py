"""partc compiles a single-device PyTorch model and a device mesh into readable per-rank Python.

Importing this package imports no torch: names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partc.api import Package as Package
    from partc.api import compile as compile
    from partc.errors import PartcError as PartcError
    from partc.ir.mesh import Mesh as Mesh
    from partc.rules import register as rule

__version__ = "0.1.0"
__all__ = ["Mesh", "Package", "PartcError", "compile", "rule"]

_HOMES = {
    "Mesh": ("partc.ir.mesh", "Mesh"),
    "Package": ("partc.api", "Package"),
    "PartcError": ("partc.errors", "PartcError"),
    "compile": ("partc.api", "compile"),
    "rule": ("partc.rules", "register"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'partc' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    found = getattr(importlib.import_module(module), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
