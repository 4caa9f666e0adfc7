"""The example model files that are installed with partc, and copies of them in the user's folder."""

from __future__ import annotations

from pathlib import Path

from partc.errors import PartcError
from partc.runtime.whole_files import replacing

_SHIPPED = Path(__file__).parents[2] / "examples"
FILES = ("mlp.py", "gpt.py", "text_gpt.py", "alice29.txt")


def copy_examples(directory: Path) -> list[Path]:
    """Copy every example into a folder and return the copies. An existing file must have the same bytes.

    Raises PartcError P0609 (another file of that name exists) and P0602 (the folder cannot be written).
    """
    copies = [directory / name for name in FILES]
    texts = [(_SHIPPED / name).read_bytes() for name in FILES]
    try:
        for path, text in zip(copies, texts, strict=True):
            if path.exists() and (not path.is_file() or path.read_bytes() != text):
                raise PartcError("P0609", f"{path} is there already", help="name another folder: partc examples DIR")
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(copies, texts, strict=True):
            with replacing(path) as file:
                file.write(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PartcError("P0602", f"cannot write to {directory}: {reason}", help="name another folder") from error
    return copies


def example_hint(path: Path) -> str:
    """The help for a missing model file: the command that copies the examples, if one has this name."""
    if path.name in FILES:
        return f"`partc examples` copies partc's own {path.name} and others to examples/"
    return "give a Python file or hf:PATH/config.json; `partc examples` copies a few to examples/"
