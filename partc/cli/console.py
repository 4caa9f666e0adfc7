"""The command line's output: phases, progress, errors and exit codes."""

from __future__ import annotations

import json as jsonlib
import math
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from partc.errors import PartcError, first_line
from partc.quoting import shown_lines

if TYPE_CHECKING:
    from partc.api import Phase

DONE, FAILED, WRONG_INPUT, BUG, INTERRUPTED = 0, 1, 2, 70, 130


class CheckFailed(Exception):
    """A check failed, and the failure has been printed."""


def guarded(command: Callable[[], Any], *, json: bool) -> int:
    """Run a command and turn its exceptions into messages and an exit code; wrong input prints no traceback.

    With `json`, an error is a JSON document on stdout too.
    """
    try:
        command()
    except CheckFailed:
        return FAILED
    except PartcError as error:
        _echo_error(str(error))
        _document(json, error.code, error.cause, error.help, str(error.source) if error.source else None)
        return WRONG_INPUT
    except click.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except click.ClickException as error:
        _say_usage(error)
        _document(json, "P0001", error.format_message(), "partc --help", None)
        return WRONG_INPUT
    except BrokenPipeError:
        return DONE
    except Exception as error:
        from partc.package.launch import RunFailed

        if isinstance(error, RunFailed):
            _echo_error(str(error))
            _document(json, "P0505", str(error), "the package's own output says what happened", None)
            return FAILED
        path = _keep(error)
        _echo_error(
            f"this is a bug in partc: {type(error).__name__}: {first_line(error)}\n  the whole traceback is in {path}"
        )
        _document(json, "bug", f"{type(error).__name__}: {first_line(error)}", f"the traceback is in {path}", None)
        return BUG
    return DONE


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print text with names from outside; their control characters are escaped."""
    click.echo(shown_lines(text), nl=nl, err=err)


def _echo_error(text: str) -> None:
    echo(text, err=True)


def _say_usage(error: click.ClickException) -> None:
    context = getattr(error, "ctx", None)
    usage = f"{context.get_usage()}\n" if context is not None else ""
    _echo_error(f"{usage}error P0001: {error.format_message()}")


def _document(wanted: bool, code: str, cause: str, help: str, source: str | None) -> None:
    if wanted:
        print(jsonlib.dumps({"error": {"code": code, "cause": cause, "help": help, "source": source}}))


def _keep(error: BaseException) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="partc-bug-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    return file.name


def command(*words: object) -> str:
    """The shell command for these words, quoted as needed."""
    return shlex.join(map(str, words))


def next_step(text: str) -> None:
    """Print the last line of a successful command."""
    echo(f"\nnext: {text}")


def shortened(place: str) -> str:
    """A file's path, relative to the current folder if it is below it."""
    below = os.path.relpath(place)
    return place if below.startswith("..") else below


def finite_or_none(number: float) -> float | None:
    """The number, or None if it is not finite: JSON has no infinity."""
    return number if math.isfinite(number) else None


_BRIEF = 0.05  # a phase without a note gets its own line only if it takes this many seconds


class Phases:
    """One aligned line for each finished phase, and a spinner on a terminal for the current one.

    Brief phases without a note share the last line.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.seconds: dict[str, float] = {}
        self.brief: list[float] = []
        self.spinner: Any = None

    def __enter__(self) -> Phases:
        self.spinner = None if self.quiet else _spinner("compiling")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.brief and error is None:
            passes = "1 brief pass" if len(self.brief) == 1 else f"{len(self.brief)} brief passes"
            self._line("Others", sum(self.brief), f"{passes}; PARTC_DEBUG=1 lists them")
        if self.spinner is not None:
            self.spinner.stop()

    def ended(self, phase: Phase) -> None:
        self.seconds[phase.label] = round(phase.seconds, 6)
        if self.quiet:
            return
        if phase.seconds < _BRIEF and not phase.note:
            self.brief.append(phase.seconds)
        else:
            self._line(phase.label, phase.seconds, phase.note)

    def _line(self, label: str, seconds: float, note: str) -> None:
        text = f"{label:<15} {seconds:7.2f} s   {note}".rstrip()
        if self.spinner is not None:
            self.spinner.console.print(shown_lines(text), highlight=False, markup=False, soft_wrap=True)
        else:
            echo(text)


@contextmanager
def progress_spinner(what: str, *, quiet: bool) -> Iterator[None]:
    """A spinner with the elapsed time, if stdout is a terminal."""
    spinner = None if quiet else _spinner(what)
    try:
        yield
    finally:
        if spinner is not None:
            spinner.stop()


def _spinner(what: str) -> Any:
    if not sys.stdout.isatty():
        return None
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True)
    progress.add_task(what, total=None)
    progress.start()
    return progress
