"""The causes of failed traces in the user's terms: a table of known causes, else torch's own first line."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from partc.errors import PartcError, Source, first_line, untraced
from partc.frontend.model_files.model_file import user_line
from partc.installed import is_machinery, shortened
from partc.runtime.train.plain_tensors import places_of

_QUOTED = 120  # the most characters of a line in a message
_CHECK = "call the model on one batch in plain PyTorch, without partc, to see the whole error"
_ROWS = (
    "in a trace x[mask] has every row of x, as their number is not known; register a mask that the constructor makes "
    "with persistent=False, and where each example has equally many rows, gather them by position: "
    "mask.long().argsort(1, descending=True, stable=True)"
)
_PLACES = (
    "in a trace the numbers that tensors hold are not known: index a tensor in place of a list, as in "
    "torch.stack(items)[i]"
)
_PART = (
    "forward couples examples, so that each of the {0} microbatches is a batch of its own: call the model on that part "
    "of a batch in plain PyTorch, without partc, or use fewer microbatches; a list of tensors, one for each example, "
    "stays whole: let loss() make it from an entry with a row for each"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A pattern over `Type: first line` of an exception, its cause, and a remedy.

    `{0}`, `{1}` are the pattern's groups; an empty cause keeps the exception's own message. With `inside`, the error
    names the line that reads values instead of the user's line that calls it.
    """

    pattern: str
    cause: str = ""
    help: str
    inside: bool = False


KNOWN: tuple[Known, ...] = (
    Known(
        pattern=r"GuardOnDataDependent|PendingUnbacked|UserError.*data-dependent|Cannot call numel|u\d+",
        cause="a branch or a size depends on the values of a tensor",
        help="choose between values with torch.where; take sizes from shapes or from options",
        inside=True,
    ),
    Known(
        pattern=r"DataDependentOutputException: aten\.(equal|allclose)",
        cause="torch.{0} gives a Python value that depends on the values of tensors",
        help="choose between values with torch.where",
        inside=True,
    ),
    Known(
        pattern=r"(?:DynamicOutputShape|DataDependentOutput)Exception: aten\.(\w+)",
        cause="{0} gives a result whose size depends on the values of a tensor",
        help="keep all elements and mask those that do not count",
        inside=True,
    ),
    Known(
        pattern=r"SymInt.*is not tracked with proxy",
        cause="a size depends on the values of a tensor, as those of a nested tensor do",
        help="keep padded rows and mask them",
    ),
    Known(
        pattern=r"TypeError: .*Sym(?:Int|Float|Bool)|got SymInt|only supported seed types",
        cause="forward passes a number that a tensor holds to a function that needs its value",
        help="compute with torch's operations on the tensor itself: x.exp() in place of numpy.exp(x.item())",
    ),
    Known(
        pattern=r"\.(?:numpy|tolist)\(\) is not supported",
        cause="forward reads the values of a tensor, which has none while it is traced",
        help="compute with torch's operations in place of NumPy's or Python's; scipy's linear_sum_assignment takes the "
        "tensor itself, and gives tensors",
        inside=True,
    ),
    Known(
        pattern=r"TypeError: \w+\(\): argument 'size' failed to unpack .*FakeTensor",
        cause="a size depends on the values of a tensor",
        help="keep padded rows and mask them",
    ),
    Known(
        pattern=r"at least two devices, (?:meta and \S+|\S+ and meta)!",
        cause="forward uses a tensor on the meta device that is neither a parameter nor a buffer{1}",
        help="models are built on the meta device, without values: make such a tensor an nn.Parameter if it is "
        "trained, read a weight in place of a view of it, or use register_buffer(name, tensor, persistent=False)",
    ),
    Known(
        pattern=r"at least two devices, (\S+) and (\S+)!",
        cause="forward puts a tensor on a device of its own: {0} and {1} meet",
        help="leave device= out, or use that of an operand (x.device): packages place tensors themselves",
    ),
    Known(
        pattern=r"Torch not compiled with CUDA|device type at start of device string|Invalid device string",
        help="leave devices out of the model: packages place tensors themselves",
    ),
    Known(
        pattern=r"(?:UnsupportedOperatorException|NotImplementedError).*?(?:aten[.:]+)(\w+)",
        cause="torch cannot trace the operation {0}: it has no rule for its result's shape",
        help="use operations on dense tensors, or register one of your own with torch.library.register_fake",
    ),
    Known(
        pattern=r"UncapturedHigherOrderOpError",
        cause="torch cannot capture the branches of torch.cond, or of another operation with branches or loops",
        help="compute both branches, and choose between their values with torch.where",
    ),
    Known(
        pattern=r"RecursionError",
        cause="forward nests calls deeper than Python's recursion limit",
        help="look for a module or function that calls itself, or nest modules less deeply",
    ),
    Known(
        pattern=r"TypeError: (?:\w+\.)?(?:forward|loss)\(\) (?:got an unexpected|missing|takes)",
        help="the entries of batch() are forward's arguments by name; a file that defines loss(model, batch) calls the "
        "model itself",
    ),
    Known(
        pattern=r"dtype|must have the same type|Input type .* and weight type", help="convert one of them; " + _CHECK
    ),
)


class RaisedError(PartcError):
    """The error P0206 for an exception that forward itself raises: with other values, it may not.

    `tests` is the number of tests whose outcomes lead to it. It is `doubtful` if the trace may have caused it by values
    that stand for others, such as all rows in place of those of a mask.
    """

    tests: int = 0
    doubtful: bool = False


def explained_error(
    error: BaseException,
    model: nn.Module,
    path: Path | None,
    parts: int = 1,
    selected: bool = False,
    counted: bool = False,
) -> PartcError:
    """The error P0206 for an exception that ended a trace, at the model's own line.

    The trace used one of `parts` parts of the batch; `selected`: a mask has selected rows; `counted`: forward has read
    numbers that a tensor holds.
    """
    said = first_line(error)
    text = f"{type(error).__name__}: {said}"
    own = _raised_by_the_model(error)
    known = None if own else next((e for e in KNOWN if re.search(e.pattern, text)), None)
    if known is None:
        cause, help = f"forward raises {text}", _CHECK
    elif not known.cause:
        cause, help = f"forward raises {text}", known.help
    else:
        found = re.search(known.pattern, text)
        groups = (*(found.groups() if found else ()), "", "")
        if "{1}" in known.cause and not groups[1]:
            plain = ", ".join(plain_tensors(model))
            groups = ("", f" (plain attributes of the model: {plain})" if plain else "")
        cause, help = known.cause.format(*groups), known.help
    if help == _CHECK and selected and re.search("size|shape|broadcast|dim", said):
        help = _ROWS
    elif help == _CHECK and counted and isinstance(error, LookupError):
        help = _PLACES
    elif help == _CHECK and parts > 1:
        help = _PART.format(parts)
    inner = innermost_user_line(error)
    if known is not None and known.inside:
        return untraced(cause + _quoted(user_line(error)), help, inner)
    source = user_line(error, path)
    if source is not None and inner is not None and shortened(source.file) != inner.file:
        cause += f" (in {inner})"
    if known is not None and known.cause:
        return untraced(cause, help, source)
    raised = RaisedError("P0206", f"the model does not trace: {cause}", help=help, source=source)
    raised.doubtful = (selected or counted) and not own
    return raised


def _quoted(source: Source | None) -> str:
    """The text of a line, as the end of a cause."""
    text = "" if source is None else linecache.getline(source.file, source.line).strip()
    return f": `{text[:_QUOTED]}`" if text else ""


def innermost_user_line(error: BaseException) -> Source | None:
    """The innermost line outside torch and partc."""
    source = user_line(error)
    return None if source is None else replace(source, file=shortened(source.file))


def _raised_by_the_model(error: BaseException) -> bool:
    """Whether the exception was raised outside torch, so that its message is the author's."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or is_machinery(frames[-1].filename):
        return False
    return (frames[-1].line or "").lstrip().startswith(("raise", "assert"))


def plain_tensors(model: nn.Module) -> Iterator[str]:
    """The names of tensors that modules hold as plain attributes, which neither state dicts nor packages contain."""
    paths = {part: path for path, part in model.named_modules()}
    known = {id(x) for x in (*model.parameters(), *model.buffers())}
    for place in places_of(model):
        if id(place.held) not in known:
            yield ".".join(filter(None, (paths[place.part], place.name)))
