"""The paths of the command line."""

from __future__ import annotations

from pathlib import Path

import click

from partc.runtime.documents import Malformed, path_of


def path(text: str) -> Path:
    """A syntactically valid path, whether or not a file exists there."""
    try:
        return path_of(str(text))  # a default is a path
    except Malformed as error:
        raise click.BadParameter(str(error)) from None


PATH = click.types.FuncParamType(path)
