"""The expression that a frame is evaluating or testing, as nodes of the syntax tree."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from bisect import bisect_right
from collections.abc import Iterator
from types import CodeType, FrameType

Span = tuple[int, int, int, int]  # first line and column, last line and column


def span_of(frame: FrameType) -> Span | None:
    """The span in the source of the value that a frame tests or computes; None before Python 3.11."""
    if not hasattr(frame.f_code, "co_positions"):
        return None
    offsets, spans = _instructions(frame.f_code, frame.f_code.co_linetable)
    return spans[bisect_right(offsets, frame.f_lasti) - 1]


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType, lines: bytes) -> tuple[list[int], list[Span | None]]:
    """The instructions of a function: their offsets, and the spans of the values that they test or compute.

    Functions that differ in their lines may be equal, so that `lines`, the table of them, is an argument.
    """
    found = [*dis.get_instructions(code)]
    places = [*code.co_positions()]
    spans: list[Span | None] = []
    for number, each in enumerate(found):
        if "JUMP" in each.opname or each.opname in ("UNARY_NOT", "TO_BOOL"):
            number -= 1  # a test, of the value that was computed before
            while found[number].opname in ("COPY", "TO_BOOL"):
                number -= 1
        spans.append(_span(*places[found[number].offset // 2]))
    return [each.offset for each in found], spans


def _span(line: int | None, last: int | None, column: int | None, end: int | None) -> Span | None:
    if line is None or last is None or column is None or end is None:
        return None
    return line, column, last, end


@functools.lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)).encode())
    except (SyntaxError, ValueError):
        return None


def path_to(tree: ast.AST, span: Span) -> list[ast.AST]:
    """The nodes that enclose a span, outermost first."""
    found: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None:
        found.append(node)
        node = next((child for child in _children(node) if _covers(child, span)), None)
    return found


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            yield child
        else:
            yield from _children(child)


def _covers(node: ast.AST, span: Span) -> bool:
    start, end = (getattr(node, "lineno"), getattr(node, "col_offset")), (  # noqa: B009
        getattr(node, "end_lineno"), getattr(node, "end_col_offset"),  # noqa: B009
    )  # fmt: skip
    return start <= span[:2] and span[2:] <= end


def enclosing_nodes(frame: FrameType | None) -> list[ast.AST]:
    """The syntax nodes around the value that a frame computes, outermost first; empty without source code."""
    span, tree = (None, None) if frame is None else (span_of(frame), tree_of(frame.f_code.co_filename))
    return [] if span is None or tree is None else path_to(tree, span)


def only_written(frame: FrameType) -> bool:
    """Whether a frame computes a value that it only writes: in a statement of its own, or as the key of an item."""
    nodes = enclosing_nodes(frame)
    key = nodes and isinstance(nodes[-1], ast.Subscript) and isinstance(nodes[-1].ctx, ast.Store)
    return bool(key) or any(isinstance(node, ast.Expr) for node in nodes)
