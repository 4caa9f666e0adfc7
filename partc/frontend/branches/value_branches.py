"""Python branches on the values of tensors, which are unknown in a trace.

    if torch.ones(4).any():                          constants: computed during the trace
    if torch.rand(()) < 0.0:                         draws from [0, 1) against numbers outside: always or never
    sizes[int(torch.rand(()))]                       the whole part of a draw, if all draws have the same
    if torch.rand(()) < 0.1:                         other draws: one outcome here, and both in traces (random_branches)
    if not self.initialized: ...                     flags that forward changes: like draws
    if self.steps % 10 == 0: ...                     counters in buffers: like flags
    if labels.max() >= words: raise ValueError(...)  guards: assumed not to raise or warn, and listed in `assumed`
    if not torch.isfinite(x).all(): x = x.clamp(…)   numbers are assumed to be finite, which `assumed` lists too
    longest = int(lengths.max())                     the largest number of an entry (largest_numbers)
    if x.mean() > 0:                                 others: both outcomes in traces, if it does not trace otherwise

Packages do not run guards. A guard is a test with an outcome that only raises an uncaught exception, or warns; asserts
are guards.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partc.errors import PartcError, Source
from partc.frontend.branches.guards import passing_guard, running_call, runs_in_while
from partc.frontend.branches.known_values import LARGEST, KnownValues, UnknownError
from partc.frontend.branches.largest_numbers import LargestNumbers
from partc.frontend.branches.outcomes import ABOVE, Outcomes
from partc.frontend.branches.random_tests import TESTS, RandomTests
from partc.frontend.by_tensor import ByTensor
from partc.frontend.gradients.frozen_weights import FrozenWeights
from partc.frontend.permissions import BOTH_OUTCOMES, UNKNOWN_NUMBERS, permitted
from partc.frontend.positional_arguments import by_position
from partc.frontend.repeats.copied_calls import CopiedCalls
from partc.frontend.selections import value_floats
from partc.frontend.selections.row_counts import Unsettled
from partc.frontend.selections.selection_tests import SelectionTests
from partc.frontend.selections.selections import Selections
from partc.frontend.statements import enclosing_nodes, path_to, span_of, tree_of
from partc.frontend.torch_call import TorchCall
from partc.frontend.traceable_forms.alignments import ctc_loss
from partc.frontend.traceable_forms.functions import UNCHECKED, for_each, is_for_each, traceable_form
from partc.frontend.traceable_forms.packed_sequences import PackedSequences
from partc.installed import line_of, tested_place, user_frame
from partc.replaced import replaced
from partc.torch_private import GuardOnValues, checks, lists, without_modes

MOST_BRANCHES = 32  # tests of values in one trace
MOST_TURNS = 8  # the same, of a test in a while loop: in a trace, such a loop may never end
CALLS = 4  # the most frames between a value and the statement that tests it
_TESTS = frozenset({*TESTS, "equal", "allclose"})
_READS = frozenset({*_TESTS, "item", "tolist", "__int__", "__float__", "__index__", "__contains__", "__format__"})
# Operations whose result has a data-dependent shape.
_SIZED_BY_VALUES = frozenset({
    "repeat_interleave", "nonzero", "argwhere", "where", "unique", "unique_consecutive", "masked_select", "bincount",
    "combinations",
})  # fmt: skip
# The second operand's numbers determine the sizes of results.
_COUNTED = frozenset({"repeat_interleave", "tensor_split"})
# The result for a counter or a flag and plain numbers is one as well.
_OF_COUNTERS = frozenset({
    "eq", "ne", "__eq__", "__ne__", "gt", "ge", "lt", "le", "add", "sub", "remainder", "logical_not", "bitwise_not",
    "__invert__",
})  # fmt: skip
# Tests for infinities and NaN, with their outcomes for finite numbers.
_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isposinf": False, "isneginf": False}
RANDOM_BRANCH = "random_branch"
# The integer that stands for a number of selected rows, by the outcomes of a trace.
_SHOWN: Mapping[str, Callable[[int], int]] = {
    "own": lambda rows: rows,
    "one": lambda rows: 1 if rows > 1 else 3,
    # Odd if the number of all rows is even, and even if it is odd.
    "half": lambda rows: rows // 2 + (rows // 2 - rows + 1) % 2,
}
_library = torch.library.Library("partc", "FRAGMENT")
_library.define(f"{RANDOM_BRANCH}(Tensor test, int number, bool outcome, bool of_values) -> ()")
_library.impl(RANDOM_BRANCH, lambda test, number, outcome, of_values: None, "CompositeExplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.partc.random_branch.default)


class ValueWatch(TorchFunctionMode):
    """A mode that knows the values of constants while a model is traced, and collects the guards that pass."""

    def __init__(
        self,
        outcomes: Outcomes = ABOVE,
        branching: Callable[[], None] = lambda: None,
        call: Callable[[], int] = lambda: -1,
        *,
        runner: str,
        largest: LargestNumbers,
        whole: bool = True,
        joined: Collection[str] = (),
        copying: bool = True,
    ) -> None:
        """`branching` is called at each branch on a random number. `call` returns the number of the running module
        call. `runner` is the file whose code calls the model. `largest` follows the entries of the batch. On the lines
        `joined`, tests of masks are branches. `copying`: repeated calls are copied.
        """
        super().__init__()
        self._runner = runner
        self.copies = CopiedCalls(runner, copying=copying)
        self._outcomes = outcomes
        self._branching = branching
        self._tests: dict[object, int] = {}  # the numbers of the tests that branches read
        self._frozen = FrozenWeights(whole=whole)
        self._drawn = RandomTests()
        self._tested: ByTensor[dict[int, object]] = ByTensor()  # tested tensor -> the test of each of its versions
        self.branches: dict[tuple[str, int], None] = {}  # the function and the line of each branch on values
        self._flags: ByTensor[bool] = ByTensor()  # booleans that forward changes in some steps, and counters
        self.assumed: dict[tuple[Source, str], None] = {}  # the line and text of each guard
        self.known = KnownValues(largest)
        self._largest = largest
        self._packed = PackedSequences(self.known.knows, self.known.know, largest.longest)
        self._finite: ByTensor[bool] = ByTensor()  # tests for finite numbers -> their outcome if all are finite
        tests = SelectionTests(outcomes.selecting.__contains__, call, self._passed, self._branch_on_values, joined)
        self.selections = Selections(tests, shown=_SHOWN[outcomes.rows], value=self.known.get, know=self.known.know)

    @property
    def test_count(self) -> int:
        """The number of tests so far whose outcomes this trace has chosen."""
        return len(self._tests)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The guards, for the user."""
        return tuple(f"Packages do not run the guard `{text}` ({source})." for source, text in self.assumed)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which this mode is active, and tests of symbolic numbers are guards too."""
        test: Callable[[Any], bool] = torch.SymBool.__bool__

        def tested(number: Any) -> bool:
            try:
                return test(number)
            except GuardOnValues:
                passed = self._passed(sys._getframe(1))
                if passed is None:
                    raise
                return passed

        def checked(check: Callable[..., None]) -> Callable[..., None]:
            def run(error: Any, condition: Any, message: Any = None) -> None:
                if isinstance(condition, Tensor):
                    condition = self.known.get(condition)
                    if condition is None:
                        self._assume(sys._getframe(1))
                        return
                elif isinstance(condition, Unsettled):
                    self._assume(sys._getframe(1))
                    return
                elif isinstance(condition, torch.SymBool):
                    try:
                        condition = test(condition)
                    except GuardOnValues:
                        self._assume(sys._getframe(1))
                        return
                with without_modes():
                    check(error, condition, message)

            return run

        symbolic = replaced(torch.SymBool, __bool__=tested)
        with symbolic, self, checks(checked), lists(self.selections.listed), self._constants_are_read():
            yield

    @contextmanager
    def _constants_are_read(self) -> Iterator[None]:
        """A context in which transformers reads the values of constants, as it does for tensors with memory.

        Without values it would build masks that hide nothing, and masks for packed sequences.
        """
        tools = sys.modules.get("transformers.utils.import_utils")
        fake = getattr(tools, "is_fake_tensor", None)
        if tools is None or fake is None:
            yield
            return
        with replaced(tools, is_fake_tensor=lambda x: fake(x) and self.known.get(x) is None):
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond
            return func(*args, **kwargs)
        versions = self.copies.versions((args, kwargs))
        made = self._called(func, args, kwargs, sys._getframe(1))
        self.copies.check_unchanged(versions)
        return made

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        accessed = getattr(func, "__self__", None)
        if accessed is Tensor.data:
            with self:
                func, args = _without_data(func, *args)
        elif accessed is Tensor.grad and isinstance(args[0], torch.nn.Parameter):
            raise PartcError(
                "P0225",
                "forward reads or sets the gradient of a weight, which packages sum between forward passes",
                help="compute gradients in forward by torch.autograd.grad",
            )
        name = getattr(func, "__name__", "")
        args, kwargs = by_position(func, name, args, kwargs)
        if is_for_each(name):
            with self:
                return for_each(name, *args, **kwargs)
        if permitted(UNKNOWN_NUMBERS).allowed:
            if (found := value_floats.made(name, args, kwargs)) is not NotImplemented:
                return found
            args, kwargs = value_floats.as_tensors(name, args, kwargs)
        self._frozen.follow(func, name, args, kwargs)
        args, kwargs = self._frozen.detached(name, (args, kwargs))
        args, kwargs = self.selections.sized(name, args, kwargs)
        args, kwargs = self.known.with_sizes(name, args, kwargs)
        if (generator := kwargs.get("generator")) is not None:
            if generator is not torch.default_generator:
                return self._drawn_by_own(TorchCall(func, name, args, kwargs))
            kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        call = TorchCall(func, name, args, kwargs)
        for replacement in (
            self._sized_by_constants,
            self.selections.call,
            self._packed.call,
            self._in_traceable_form,
            self._random_test,
            self._value_read,
        ):
            made = replacement(call, frame)
            if made is not NotImplemented:
                self.known.follow(call, made, known=not self.selections.hold((args, kwargs)))
                return made
        self.known.check_places(name, args, kwargs)
        with self._suspended() if isinstance(func, FunctionType) else nullcontext():
            made = self.copies.call(func, args, kwargs, frame)
        self._follow(call, made, known=self.selections.follow(name, args, kwargs, made))
        return made

    def _sized_by_constants(self, call: TorchCall, _: FrameType) -> Any:
        """The result of a call whose size depends on known values; NotImplemented of other calls."""
        name, args = call.name, call.args
        if name in _COUNTED and len(args) > 1 and isinstance(args[1], Tensor):
            numbers = self.known.get(args[1])
            if numbers is not None and numbers.dim():
                with self:
                    return _counted(name, args[0], numbers, *args[2:], **call.kwargs)
        listed = name == "tensor" and isinstance(args[0], list) and any(isinstance(x, Tensor) for x in args[0])
        if listed or (name in _SIZED_BY_VALUES and (name != "where" or len(args) == 1)):
            return self.known.constant(self.known.computed(call))
        return NotImplemented

    def _in_traceable_form(self, call: TorchCall, frame: FrameType) -> Any:
        """The result of a function that has a form which traces can follow; NotImplemented of others."""
        if call.name == "ctc_loss":
            return self._ctc_loss(call, frame)
        made = traceable_form(call.name, call.args, call.kwargs)
        if made is not NotImplemented:
            self._assume_checks(call.name, frame)
        return made

    def _ctc_loss(self, call: TorchCall, frame: FrameType) -> Any:
        words = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
        named = {**dict(zip(words, call.args, strict=False)), **call.kwargs}
        scores, targets, *lengths = (named[word] for word in words[:4])
        if not all(map(self._fits, lengths, (scores.shape[0], targets.shape[-1]))):
            self._assume_checks("ctc_loss", frame)
        return ctc_loss(**{**named, "targets": self.selections.labels(targets, named["target_lengths"])})

    def _assume_checks(self, name: str, frame: FrameType) -> None:
        """List the checks that a function makes in eager code, and its form in packages does not."""
        unchecked = UNCHECKED.get(name)
        if unchecked is not None and (caller := user_frame(frame)) is not None:
            self.assumed[line_of(caller), unchecked] = None

    def _fits(self, lengths: Tensor | Sequence[int], most: int) -> bool:
        """Whether lengths are constants up to `most`."""
        known = self.known.get(lengths) if isinstance(lengths, Tensor) else lengths
        with without_modes():
            return known is not None and bool((torch.as_tensor(known) <= most).all())

    def _random_test(self, call: TorchCall, frame: FrameType) -> Any:
        """A random number, flag or counter that is read, or the outcome of its test; NotImplemented of other calls."""
        name, args = call.name, call.args
        if name == "item" and self._drawn.is_uniform(args[0]):
            return self._drawn.number(args[0])
        if name in ("__int__", "__index__") and (whole := self._drawn.whole_part(args[0])) is not None:
            return whole
        if args and args[0] in self._flags:
            return self._flag_read(call, frame)
        if name in TESTS and (test := self._drawn.of(args[0])) is not None and not test.is_certain:
            return self._branch(args[0], test.below, (test.draw, test.limit))
        return NotImplemented

    def _flag_read(self, call: TorchCall, frame: FrameType) -> Any:
        """A flag or counter that is read or computed with, or the outcome of its test; else NotImplemented."""
        name, args = call.name, call.args
        if name in _OF_COUNTERS and not any(isinstance(x, Tensor) for x in args[1:]):
            made = call.run()
            self._flags[made] = True
            return made
        if name not in (*TESTS, "item"):
            return NotImplemented
        counts = args[0].dtype is not torch.bool
        path = enclosing_nodes(frame)
        around = path[-2] if len(path) > 1 else None
        negation = isinstance(around, ast.UnaryOp) and isinstance(around.op, ast.Not)
        tested = negation or isinstance(around, ast.Compare | ast.If)
        if counts and name == "item" and (args[0].is_floating_point() or not tested):
            return NotImplemented  # Python would compare in fp64
        before = args[0].reshape(()).clone()  # the branch may change the flag
        self._flags[before] = True
        if name == "item":
            return before
        # All such branches of a model run their bodies in the same trace: `if not flag` and `if count % 2 == 0`.
        negated = around is None or negation
        return self._branch(before.ne(0) if counts else before, negated, object())

    def _value_read(self, call: TorchCall, _: FrameType) -> Any:
        """The number that a call reads from a tensor, if it is known, assumed or a count; NotImplemented for calls that
        read none.
        """
        name, args = call.name, call.args
        if name not in _READS:
            return NotImplemented
        real = self.known.computed(call)
        if real is not NotImplemented:
            return real
        passed = self._passed(_calling_frame()) if name in _TESTS else None
        if passed is None and name in (*_TESTS, "item"):
            passed = self._assumed_finite(args[0], _calling_frame())
        if passed is not None:
            return passed
        number = self._largest.number(args[0]) if name in ("item", "__int__", "__index__") else None
        if number is not None:
            return number
        found = self.selections.only_place(name, args[0])
        if found is not NotImplemented and (frame := user_frame(_calling_frame())) is not None:
            self.assumed[line_of(frame), "nonzero() finds one element"] = None
        elif found is NotImplemented:
            found = self.selections.answer(name, args[0])
        if found is NotImplemented:
            if name in _TESTS and self._may_branch() and permitted(BOTH_OUTCOMES).may():
                return self._branch_on_values(args[0] if name in TESTS else _alike(name, *args, **call.kwargs))
            return call.run()
        return format(found, *args[1:]) if name == "__format__" else found

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """A context for a Python function of torch, in which this mode is off but tests of tensors still count as
        guards.
        """
        truth = Tensor.__bool__

        @functools.wraps(truth)
        def true(x: Tensor) -> bool:
            passed = self._passed(_calling_frame()) if self.known.get(x) is None else None
            return truth(x) if passed is None else passed

        with replaced(Tensor, __bool__=true):
            yield

    def _drawn_by_own(self, call: TorchCall) -> Tensor:
        """Numbers drawn from the model's own generator, as a constant; `frozen_state` refuses a generator that
        advances.

        Raises PartcError P0225 if their number or distribution depends on other values.
        """
        name, args = call.name, call.args
        filled = name.endswith(("_", "_like"))
        try:
            given = self.known.operands((args[filled:], dict(call.kwargs)), shaped=False)
            large = filled and args[0].numel() > LARGEST
        except UnknownError:
            large = True
        real: Tensor | None = None
        with without_modes():
            first = (torch.empty(tuple(args[0].shape), dtype=args[0].dtype),) if filled and not large else ()
            real = None if large else call.func(*first, *given[0], **given[1])
        if real is None or real.numel() > LARGEST:
            raise PartcError(
                "P0225",
                f"forward draws by {name} from a generator of its own",
                help="draw without a generator, so that each step draws anew, or draw in the constructor into a buffer",
            )
        with without_modes():
            values = real.flatten().tolist()
        made = torch.tensor(values, dtype=real.dtype).reshape(real.shape)
        self.known.know(made, real)
        if not name.endswith("_"):
            return made
        with self:
            changed: Tensor = args[0].copy_(made)
        return changed

    def _follow(self, call: TorchCall, made: Any, *, known: bool) -> None:
        """Note all that is known of a call's result. `known` is whether its values may follow from those of
        constants.
        """
        if not known:
            self.known.follow(call, made, known=False)
            return
        self._drawn.follow(call.name, call.args, call.kwargs, made)
        self._largest.follow(call, made)
        self._follow_finite(call.name, call.args, made)
        test = self._drawn.of(made)
        if test is not None and test.is_certain:
            with without_modes():
                self.known.know(made, torch.full(made.shape, test.certain_outcome, dtype=torch.bool))
            return
        self.known.follow(call, made, known=True)

    def _branch(self, test: Tensor, below: bool, key: object, *, of_values: bool = False) -> bool:
        """Choose the outcome of a branch on a random number, flag, counter or other values, and record the branch in
        the graph.

        `key` identifies the test: all branches on one test have the same outcome in a trace.
        """
        self._branching()
        number = self._tests.setdefault(key, len(self._tests))
        outcome = (number in self._outcomes.below) == below
        torch.ops.partc.random_branch.default(test.reshape(()), number, outcome, of_values)
        return outcome

    def _branch_on_values(self, x: Tensor) -> bool:
        """The outcome of a branch on whether an element of a tensor is set. Branches on one tensor have one test."""
        if (place := tested_place(sys._getframe(1))) is not None:
            self.branches[place] = None
        known = self._tested.get(x)
        if known is None:
            known = self._tested[x] = {}
        key = known.setdefault(x._version, object())
        return self._branch(x.detach().ne(0).any(), False, key, of_values=True)

    def _may_branch(self) -> bool:
        repeated = runs_in_while(_calling_frame(), self._runner)
        return len(self._tests) < (MOST_TURNS if repeated else MOST_BRANCHES)

    def flag(self, buffer: Tensor) -> None:
        """Note a buffer whose tests are branches."""
        self._flags[buffer] = True

    # -- guards --------------------------------------------------------------------------------

    def _assume(self, frame: FrameType | None) -> None:
        """List a call of torch's checks as a guard, at the innermost line outside the functions that receive its
        condition.
        """
        frame = user_frame(frame)
        for _ in range(CALLS):
            call = running_call(frame)
            handed = call is not None and call.args and isinstance(call.args[0], ast.Name)
            if frame is None or frame.f_back is None or not handed:
                break
            assert call is not None and isinstance(call.args[0], ast.Name)
            if call.args[0].id not in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
                break
            frame = frame.f_back
        if frame is not None:
            call = running_call(frame)
            tested = call.args[0] if call is not None and call.args else call or ast.Name("check")
            self.assumed[line_of(frame), ast.unparse(tested)] = None

    def _passed(self, frame: FrameType | None) -> bool | None:
        """The outcome under which a guard neither raises nor warns; None if the tested value belongs to no guard."""
        guard = passing_guard(frame, CALLS, self._runner)
        if guard is None:
            return None
        source, text, outcome = guard
        self.assumed[source, text] = None
        return outcome

    def _follow_finite(self, name: str, args: tuple[Any, ...], made: Any) -> None:
        """Remember a test for finite numbers, reduced over its elements or negated."""
        outcome = _FINITE.get(name)
        if outcome is None and args and name in ("all", "any", "logical_not", "__invert__", "bitwise_not"):
            held = self._finite.get(args[0])
            outcome = None if held is None else held ^ (name not in ("all", "any"))
        if outcome is not None and isinstance(made, Tensor):
            self._finite[made] = outcome

    def _assumed_finite(self, test: Any, frame: FrameType | None) -> bool | None:
        """List a test for finite numbers as assumed, and return its outcome; None for other tests."""
        outcome = self._finite.get(test)
        if outcome is None or frame is None:
            return None
        span, tree = span_of(frame), tree_of(frame.f_code.co_filename)
        path = path_to(tree, span) if span is not None and tree is not None else []
        self.assumed[line_of(frame), ast.unparse(path[-1]) if path else "numbers are finite"] = None
        return outcome


def _without_data(func: Callable[..., Any], x: Tensor, *value: Tensor) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The call for which `x.data` or `x.data = value` stands: `x.detach()`, or a copy into it."""
    if not value:
        return Tensor.detach, (x,)
    if (x.shape, x.dtype) != (value[0].shape, value[0].dtype):
        return func, (x, *value)
    if x.requires_grad and not isinstance(x, torch.nn.Parameter):
        raise PartcError(
            "P0212",
            "forward assigns other values to the data of a computed tensor, whose earlier views keep the old ones",
            help="use x.data.copy_(values), which changes views too, or a new tensor",
        )
    return Tensor.copy_, (x.detach(), value[0].detach())


def _alike(name: str, one: Tensor, other: Tensor, *tolerances: Any, **named: Any) -> Tensor:
    """The result of torch.equal or torch.allclose as a tensor."""
    if name == "allclose":
        return torch.isclose(one, other, *tolerances, **named).all()
    return (one == other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool)


def _calling_frame() -> FrameType | None:
    """The frame that called into this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _counted(name: str, x: Tensor, numbers: Tensor, dim: int | None = None, **_: Any) -> Any:
    """tensor_split at known indices, or repeat_interleave by known numbers."""
    with without_modes():
        places = numbers.tolist()
    if name == "tensor_split":
        return x.tensor_split(places, dim or 0)
    x, dim = (x.flatten(), 0) if dim is None else (x, dim)
    rows = places if len(places) > 1 else places * x.shape[dim]
    return x.index_select(dim, torch.tensor([row for row, count in enumerate(rows) for _ in range(count)]))
