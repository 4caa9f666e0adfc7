"""Wrong use of a package, told in words."""

from __future__ import annotations


class UsageError(Exception):
    """Wrong use of the package: a code, one sentence of cause, one of help.

    `alike` says that every rank raises the same: none of them has failed the others.
    """

    def __init__(self, code: str, cause: str, help: str, *, alike: bool = False, exit_code: int = 2) -> None:
        super().__init__(f"error {code}: {cause}\n  help: {help}")
        self.code = code
        self.cause = cause
        self.help = help
        self.alike = alike
        self.exit_code = exit_code
