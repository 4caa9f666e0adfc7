"""Coded errors: the fault in the user's input, its place, its cause and its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place in the user's code; the file is empty if only the module is known."""

    file: str
    line: int
    module: str = ""  # path of the nn.Module that was running, e.g. "blocks.3.attn"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"module {self.module}"


_LONGEST = 3000  # the most characters of a cause that are printed


class PartcError(Exception):
    """Wrong input: one sentence of cause, one of help, and a code that `partc explain` knows.

    The command line prints it without a traceback and exits with 2.
    """

    def __init__(self, code: str, cause: str, *, help: str = "", source: Source | None = None) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause
        self.help = help
        self.source = source

    def __str__(self) -> str:
        place = f"{self.source}: " if self.source else ""
        hint = f"\n  help: {self.help}" if self.help else ""
        # A cause may quote a file.
        cause = self.cause if len(self.cause) <= _LONGEST else f"{self.cause[:_LONGEST]} ..."
        return f"{place}error {self.code}: {cause}{hint}"


def untraced(cause: str, help: str, source: Source | None = None) -> PartcError:
    """P0206, for a model that does not trace."""
    return PartcError("P0206", f"the model does not trace: {cause}", help=help, source=source)


class InternalError(AssertionError):
    """A broken invariant inside partc: a bug in the compiler, never the user's fault."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that is not blank, up to 1,000 characters; its type's name if it has
    none or cannot be read.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:
        lines = []
    return lines[0][:1000] if lines else type(error).__name__
