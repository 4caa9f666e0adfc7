"""What the command line asks for: the options of a compile, and a model's or a package's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.errors import PartcError

if TYPE_CHECKING:
    from partc.options import Options


_KEPT = (
    "mesh", "microbatches", "schedule", "virtual_stages", "precision", "seed", "shard", "zero", "recompute", "casts",
)  # fmt: skip


# What a package's plan leaves out where nobody asked for it.
_DEFAULTS = {"schedule": "1f1b", "shard": (), "zero": "0", "recompute": "none", "casts": ()}


def options(given: Mapping[str, Any]) -> tuple[Options, dict[str, str]]:
    """The checked options of a compile, and those for the model file."""
    from partc.options import Options

    definitions: dict[str, str] = {}
    for text in given["definitions"]:
        name, found, value = text.partition("=")
        if not found or not name.isidentifier():
            raise PartcError("P0003", f"-D {text!r} is not NAME=VALUE", help="for example -D layers=4")
        _define(definitions, name, value)
    for name in ("batch", "seq"):
        if given[name] is not None:
            if given[name] < 1:
                raise PartcError("P0004", f"--{name} {given[name]} is out of range", help="give 1 or more")
            _define(definitions, name, str(given[name]))
    return Options.checked(**{name: given[name] for name in _KEPT}), definitions


def _define(definitions: dict[str, str], name: str, value: str) -> None:
    if name in definitions:
        raise PartcError("P0003", f"option {name!r} is given twice", help="give it one value")
    definitions[name] = value


def target(name: str, given: Mapping[str, Any]) -> tuple[str, Options, dict[str, str]]:
    """What to compile again: a model with these options, or a package with its own."""
    if Path(name).is_dir():
        from partc.launch import read_plan
        from partc.options import TABLE

        plan = read_plan(Path(name))
        if given["mesh"] is not None or given["definitions"]:
            raise PartcError(
                "P0603", f"{name} is a package, with a mesh and options of its own", help="inspect its model file"
            )
        kept = {name: plan[name] for name in ("mesh", "microbatches", "precision", "seed")}
        command = {**_DEFAULTS, **plan.get("command", {})}
        if command["schedule"] == TABLE:
            command["schedule"] = str(Path(name) / TABLE)
        definitions = [f"{name}={value}" for name, value in plan["options"].items()]
        wanted, found = options({**given, **kept, **command, "definitions": definitions})
        return str(Path(name) / "model.py"), wanted, found
    if given["mesh"] is None:
        raise PartcError("P0603", "inspecting a model needs a mesh", help="add --mesh SPEC, for example --mesh 2x2x2")
    wanted, found = options(given)
    return name, wanted, found
