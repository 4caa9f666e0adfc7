"""The paths of the command line."""

from __future__ import annotations

from pathlib import Path

import click

from partc.runtime.documents import Malformed, path_of


def path(text: str) -> Path:
    """A path that a file can have, whether or not there is one."""
    try:
        return path_of(str(text))  # a default is a path
    except Malformed as error:
        raise click.BadParameter(str(error)) from None


PATH = click.types.FuncParamType(path)
