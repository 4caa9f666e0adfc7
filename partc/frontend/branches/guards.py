"""Guards: tests in the user's code with an outcome that only raises an uncaught exception, or warns.

if labels.max() >= words: raise ValueError(...)      passes if the test is false
assert (mask.sum(1) > 0).all()                       passes if the test is true
if not valid.all(): warnings.warn("...")             passes if `valid.all()` is true
if bad.any(): k = bad.nonzero()[0]; raise ...        passes if the test is false: the exception follows in any case
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType

from partc.errors import Source
from partc.frontend.statements import enclosing_nodes, path_to, span_of, tree_of
from partc.installed import is_machinery, shortened

_SPOKEN = frozenset({"warn", "warning", "warning_once", "warn_once", "info", "debug", "error", "print"})
_ASSERTIONS = frozenset({"_assert", "_check"})
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await)


def passing_guard(frame: FrameType | None, calls: int, runner: str) -> tuple[Source, str, bool] | None:
    """The guard that tests the value computed by this frame, as (line, text, passing outcome); None if there is
    none.

    The guard is at most `calls` - 1 calls above the frame. `runner` is the file whose code calls the model: handlers of
    exceptions from there on are not the model's.
    """
    if frame is None or not calls:
        return None
    span = span_of(frame)
    tree = tree_of(frame.f_code.co_filename)
    if span is None or tree is None:
        return None
    path = path_to(tree, span)
    statement = next((node for node in reversed(path) if isinstance(node, ast.stmt)), None)
    if statement is None:
        return None
    inside = [node for node in path[path.index(statement) + 1 :] if isinstance(node, ast.expr)]
    if isinstance(statement, ast.If | ast.Assert) and inside[:1] == [statement.test]:
        wanted = None if _is_caught(frame, runner) else _quiet_outcome(statement)
        source = Source(file=shortened(frame.f_code.co_filename), line=statement.lineno)
        found = None if wanted is None else (source, ast.unparse(statement.test), wanted)
        expression: ast.expr | None = statement.test
    elif isinstance(statement, ast.Return):
        found, expression = passing_guard(frame.f_back, calls - 1, runner), statement.value
    else:
        return None
    if found is None or expression is None:
        return None
    flips = next((flipped for leaf, flipped in _tested(expression) if leaf in inside), None)
    return None if flips is None else (found[0], found[1], found[2] ^ flips)


def running_call(frame: FrameType | None) -> ast.Call | None:
    """The innermost call expression that a frame is evaluating."""
    span, tree = (None, None) if frame is None else (span_of(frame), tree_of(frame.f_code.co_filename))
    if span is None or tree is None:
        return None
    return next((node for node in reversed(path_to(tree, span)) if isinstance(node, ast.Call)), None)


def _tested(expression: ast.expr, flipped: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """The operands of `not`, `and` and `or`, and whether each is negated."""
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        yield from _tested(expression.operand, not flipped)
    elif isinstance(expression, ast.BoolOp):
        for value in expression.values:
            yield from _tested(value, flipped)
    else:
        yield expression, flipped


def _quiet_outcome(statement: ast.If | ast.Assert) -> bool | None:
    """The outcome of a test whose other outcome only raises or warns."""
    if isinstance(statement, ast.Assert):
        return True
    if _speaks(statement.body):
        return False
    return True if statement.orelse and _speaks(statement.orelse) else None


def runs_in_while(frame: FrameType | None, runner: str) -> bool:
    """Whether a frame's running statement is in a while loop of the model, in its function or in a caller."""
    return any(isinstance(node, ast.While) for node, _ in _around(frame, runner))


def _is_caught(frame: FrameType | None, runner: str) -> bool:
    """Whether the model catches exceptions around the running statement, in its function or in a caller.

    A handler that ends with an exception of its own, or with the same one, catches none.
    """
    return any(
        isinstance(node, ast.Try) and inner in node.body and not all(_ends(handler.body) for handler in node.handlers)
        for node, inner in _around(frame, runner)
    )


def _around(frame: FrameType | None, runner: str) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The model's syntax nodes around the value that a frame computes, each with the next inner one; then those of its
    callers.
    """
    while frame is not None and frame.f_code.co_filename != runner:
        if not is_machinery(frame.f_code.co_filename):
            yield from pairwise(enclosing_nodes(frame))
        frame = frame.f_back


def _speaks(body: list[ast.stmt]) -> bool:
    """Whether statements only warn, or end with an exception."""
    return _ends(body) or (
        all(map(_is_speech, body)) and not all(isinstance(one, ast.Assign | ast.Pass) for one in body)
    )


def _ends(body: list[ast.stmt]) -> bool:
    """Whether statements end with an exception."""
    return _raises(body[-1]) and not any(isinstance(node, _LEAVES) for one in body for node in ast.walk(one))


def _raises(statement: ast.stmt) -> bool:
    """Whether a statement is a `raise`, or an assertion of False, also by a function of torch."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.args:
        called, test = statement.value.func, statement.value.args[0]
        name = getattr(called, "attr", getattr(called, "id", ""))
        return name in _ASSERTIONS and isinstance(test, ast.Constant) and not test.value
    return isinstance(statement, ast.Raise)


def _is_speech(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise | ast.Pass):
        return True
    if isinstance(statement, ast.Assign):  # builds a message
        return isinstance(statement.value, ast.Constant | ast.JoinedStr)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return getattr(called, "attr", getattr(called, "id", "")) in _SPOKEN
    return False
