"""A plan: every decision about how a model is spread over ranks, as a JSON document.

    {"mesh": "pp=2,dp=4,tp=8", "microbatches": 8, "schedule": "1f1b", "zero": 1, "options": {"batch": 64}}

`partc plan -o plan.json` writes one on one line, so that the file is also a list of one plan.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from partc.cluster.cluster import Cluster, fitted
from partc.compilation.given_options import BUCKET
from partc.compilation.options import Options
from partc.cost.calibration import AttentionKernel
from partc.errors import PartcError
from partc.runtime.documents import Malformed, Positive, at_least, at_most, contents, decoded, parsed
from partc.schedules import SCHEDULES

LARGEST = 1 << 28  # the most bytes of a file of plans or runs

AUTO = "auto"  # the mesh that lets the planner decide
DECIDED = (
    "mesh", "experts", "batch_over", "microbatches", "schedule", "virtual_stages", "stage_calls", "zero", "recompute",
    "loss_chunks", "nodes", "kernels",
)  # fmt: skip
REDUCED = ("bucket", "grad_reduce", "compress_grads")  # options for sums of gradients, which users decide
# Options that are common to all plans of a search.
GIVEN_TO_SEARCH = ("precision", "kernels", "cuda_graphs", "optimizer", *REDUCED)

FP8 = "fp8"  # a precision that exists only in predictions
# Fields that only affect predictions, with the values that describe packages, the default first.
_PREDICTED: Mapping[str, tuple[object, ...]] = {
    "attention": ("auto",), "tp_overlap": (None, False), "dp_overlap": (True,), "ep_by_node": (None, False),
    "gradients": (None, "fp32"), "weights": ("fp32",), "offload": (0.0,),
}  # fmt: skip
# Fields that are not compile options, the model file's options among them.
_NOT_COMPILED = ("options", *_PREDICTED)

Scalar = bool | int | float | str
_LONGEST = 1000  # the most characters of a decision

# Names that other programs use -> partc's, without case, spaces and punctuation.
_SCHEDULES: Mapping[str, str] = {
    "afab": "gpipe", "fthenb": "gpipe", "vpp": "interleaved", "interleaved1f1b": "interleaved",
    "1f1binterleaved": "interleaved", "zb": "zero-bubble", "zbh1": "zero-bubble", "zb1p": "zero-bubble",
    "zerobubbleh1": "zero-bubble", "zbvzerobubble": "zbv",
}  # fmt: skip
_PRECISIONS: Mapping[str, str] = {
    "bfloat16": "bf16", "bf16mixed": "bf16", "float16": "fp16", "half": "fp16", "16mixed": "fp16", "float32": "fp32",
    "float": "fp32", "float64": "fp64", "double": "fp64", "fp8cs": FP8, "fp8ds": FP8, "fp8sc": FP8, "fp8mx": FP8,
    "mxfp8": FP8,
}  # fmt: skip

_ATTENTION: Mapping[str, str] = {
    "flash": "flash-2", "flash2": "flash-2", "fa2": "flash-2", "flashattention": "flash-2",
    "flashattention2": "flash-2", "flash3": "flash-3", "fa3": "flash-3", "flashattention3": "flash-3",
    "fused": "cudnn",
}  # fmt: skip

_AXIS = re.compile("(pp|dp|cp|ep|tp)[: ]*([0-9]+)")  # an axis and its size without "="

# Megatron-LM's names of the modules that it recomputes.
_RECOMPUTED: Mapping[str, str] = {
    "core_attn": "attention", "layernorm": "rms_norm,layer_norm", "moe_act": "silu,gelu,sigmoid,clamp,mul,to",
    "moe": "experts", "mla_up_proj": "q_b_proj,kv_b_proj,cat,mul,add,neg",
}  # fmt: skip
# Megatron-LM's names.
_WORDS: Mapping[str, str] = {"tp_comm_overlap": "tp_overlap", "overlap_grad_reduce": "dp_overlap"}


def _is_short(value: str) -> str:
    return "" if len(value) <= _LONGEST else f"longer than {_LONGEST:,} characters"


def _is_option(value: dict[str, Scalar]) -> str:
    wrong = next((name for name in value if not name.isidentifier()), None)
    return "" if wrong is None else f"whose entry {wrong[:40]!r} is not a name of an option"


_Text = Annotated[str, _is_short]
_Share = Annotated[float, at_least(0), at_most(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """The options of a compile that decide speed and memory, and those of the model file (`options`)."""

    mesh: _Text
    experts: _Text | None = None
    batch_over: _Text | None = None  # the calls whose batch tp cuts
    microbatches: Positive = 1
    schedule: _Text = "1f1b"
    virtual_stages: Positive | None = None  # stages per pipeline rank; None: the schedule's default
    stage_calls: _Text | None = None  # calls of each stage; None: balanced by flops
    zero: int | _Text = 0
    recompute: _Text = "none"
    precision: _Text = "bf16"
    kernels: _Text = "auto"
    cuda_graphs: bool = False  # steps are recorded on GPUs, and replayed without the host
    loss_chunks: Positive = 1
    bucket: _Text = BUCKET
    nodes: Positive | None = None
    grad_reduce: _Text = "fp32"
    compress_grads: _Text = "none"
    optimizer: _Text | None = None
    attention: AttentionKernel = "auto"  # predictions only: the kernel of fused attention
    # Predictions only: collectives of tp run in pieces that overlap with pieces of products; a token's row is sent to a
    # node once, and from there to its experts; the type in which gradients are held and summed. None: as in recipes of
    # NeMo and Megatron-Bridge with fp8 products, as packages do with others.
    tp_overlap: bool | None = None
    ep_by_node: bool | None = None
    gradients: Literal["fp32", "bf16"] | None = None
    dp_overlap: bool = True  # predictions only: sums of gradients and gathers of parameters overlap with computation
    weights: Literal["fp32", "bf16"] = "fp32"  # predictions only: the type of weights and of the optimizer's states
    offload: _Share = 0.0  # predictions only: the share of saved values that waits in the host's memory
    options: Annotated[dict[str, Scalar], _is_option] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, document: object, *, place: str = "the plan") -> ParallelPlan:
        """Read the result of `document`. Raises PartcError P0804."""
        try:
            return decoded(cls, document)
        except Malformed as error:
            raise _unreadable(place, error) from None

    def document(self) -> dict[str, Any]:
        """The plan as a JSON document, without fields that have their defaults."""
        known = {name: getattr(self, name) for name in (item.name for item in fields(self))}
        defaults = ParallelPlan(mesh="")
        kept = ("mesh", "microbatches", "schedule", "zero", "recompute", "precision", "kernels")
        return {name: value for name, value in known.items() if name in kept or value != getattr(defaults, name)}

    @property
    def text(self) -> str:
        """The plan on one line."""
        return json.dumps(self.document())

    def compile_options(self) -> Options:
        """The checked options of the plan's compile. Raises PartcError as Options.checked."""
        if self.schedule.lower().endswith(".csv"):
            help = "give --schedule to partc compile"
            raise PartcError("P0804", f"the plan names the file {self.schedule}", help=help)
        self.check_emitted()
        # With one stage on each rank, `interleaved` is `1f1b`.
        several = self.virtual_stages is not None and (self.virtual_stages > 1 or self.schedule == "interleaved")
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_COMPILED}
        given["virtual_stages"] = self.virtual_stages if several else None
        return Options.checked(**given, seed=0, shard=())

    def on(self, cluster: Cluster) -> ParallelPlan:
        """The plan with the kernels of a cluster's devices. Raises PartcError P0803."""
        fitted(cluster, self.compile_options().mesh.size)
        if self.kernels != "auto":
            return self
        return replace(self, kernels="triton" if cluster.device.kind == "gpu" else "aten")

    def check_emitted(self) -> None:
        """Check that the plan has no fields that only exist in predictions. Raises PartcError P0804."""
        for name, emitted in _PREDICTED.items():
            if getattr(self, name) not in emitted:
                help = f'partc simulate predicts such a program; leave "{name}" out to compile'
                value = json.dumps(getattr(self, name))
                raise PartcError("P0804", f"the plan has {name}: {value}, which no package has", help=help)

    @property
    def emitted(self) -> ParallelPlan:
        """The plan of the emitted program, without fields that only affect predictions: bf16 instead of fp8, whole
        collectives that overlap with computation, and weights and gradients in fp32.
        """
        precision = "bf16" if self.precision == FP8 else self.precision
        sums = "bf16" if self.sums_in_bf16 else self.grad_reduce
        usual: dict[str, Any] = {name: values[0] for name, values in _PREDICTED.items()}
        return replace(self, precision=precision, grad_reduce=sums, **usual)

    @property
    def overlaps_tp(self) -> bool:
        """Whether collectives of tp run in pieces that overlap with products."""
        return self.precision == FP8 if self.tp_overlap is None else self.tp_overlap

    @property
    def sends_by_node(self) -> bool:
        """Whether a token's row is sent to a node once."""
        return self.precision == FP8 if self.ep_by_node is None else self.ep_by_node

    @property
    def sums_in_bf16(self) -> bool:
        """Whether gradients are held and summed in bf16."""
        return self.gradients == "bf16" or (self.gradients is None and self.precision == FP8)

    @property
    def level(self) -> int:
        """The ZeRO level, without its axes."""
        return int(str(self.zero)[:1] or 0)

    @property
    def span(self) -> int:
        """The number of neighbours in dp over which ZeRO shards; 0 if its axes are named, or are all axes."""
        ranks = str(self.zero).partition("@")[2]
        return int(ranks) if ranks.isdecimal() else 0

    @property
    def definitions(self) -> dict[str, str]:
        """The options of the model file as texts, as -D takes them."""
        return {name: str(value) for name, value in sorted(self.options.items())}

    @property
    def flags(self) -> str:
        """The plan as options of `partc compile`, without defaults."""
        return shlex.join(self._flags())

    def _flags(self) -> Iterator[str]:
        defaults = ParallelPlan(mesh="")
        yield from ("--mesh", self.mesh)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in ("mesh", *_NOT_COMPILED) and value != getattr(defaults, item.name):
                yield from (f"--{item.name.replace('_', '-')}", *(() if value is True else (str(value),)))
        for name, value in self.options.items():
            yield from ("-D", f"{name}={value}")


def normalised_document(document: object) -> object:
    """A plan in the spelling of tables or other programs, converted to the form of `document`.

    `null` means an absent field, 4.0 and "4" are 4, case does not matter, a mesh may be an object or a list of sizes,
    schedules and types have several names, and several stages per rank under 1f1b mean interleaved.
    """
    if not isinstance(document, dict):
        return document
    found = {name: _plain(value) for name, value in document.items() if value is not None}
    for other, name in _WORDS.items():
        if other in found:
            found[name] = found.pop(other)
    if "grad_reduce_in_fp32" in found:
        found["gradients"] = "fp32" if found.pop("grad_reduce_in_fp32") else "bf16"
    found = {name: _FORMS[name](value) if name in _FORMS else value for name, value in found.items()}
    several, schedule = found.get("virtual_stages"), found.get("schedule", "1f1b")
    if isinstance(several, int) and schedule in ("1f1b", "interleaved"):
        found["schedule"] = "interleaved" if several > 1 else "1f1b"
    return found


def _fold(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text)


def _plain(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else _integral(value)


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: object) -> object:
    """An integer that is written as a float or as text."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value.strip()) else _integral(value)


def _mesh(value: object) -> object:
    """`{"pp": 2, "dp": 4}`, [2, 4, 8], 8, "pp2 dp4" or "pp:2,dp:4" in the form of a mesh."""
    if isinstance(value, str):
        sized = re.fullmatch(f"({_AXIS.pattern}[ ,/_-]*)+", value)
        return ",".join(f"{axis}={size}" for axis, size in _AXIS.findall(value)) if sized else value
    sizes = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    numbers = [_number(size) for size in sizes]
    if not all(type(size) is int for size in numbers):
        return value
    if isinstance(value, dict):
        return ",".join(f"{axis.strip().lower()}={size}" for axis, size in zip(value, numbers, strict=True))
    return "x".join(map(str, numbers))


def _options(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {name: _integral(option) for name, option in value.items() if option is not None}


def _recompute(value: object) -> object:
    if isinstance(value, bool):
        return "full" if value else "none"
    if not isinstance(value, (str, list)):
        return value
    words = value.split(",") if isinstance(value, str) else value or ["none"]
    return ",".join(_RECOMPUTED.get(word := str(name).strip().lower(), word) for name in words)


def _stage_calls(value: object) -> object:
    return ",".join(str(_integral(number)) for number in value) if isinstance(value, list) else value


def _zero(value: object) -> object:
    return re.sub("^(zero|stage)[-_ ]*(?=[0-9])", "", value) if isinstance(value, str) else value


def _spelled(names: Mapping[str, str], prefix: str, value: object) -> object:
    return names.get(_fold(value).removeprefix(prefix), value) if isinstance(value, str) else value


# Fields of a plan, and the functions that convert their values from other spellings.
_FORMS: Mapping[str, Callable[[object], object]] = {
    "options": _options,
    "mesh": _mesh,
    "recompute": _recompute,
    "stage_calls": _stage_calls,
    "zero": _zero,
    "microbatches": _number,
    "virtual_stages": _number,
    "loss_chunks": _number,
    "nodes": _number,
    "schedule": partial(_spelled, {**{_fold(name): name for name in SCHEDULES}, **_SCHEDULES}, "schedule"),
    "precision": partial(_spelled, _PRECISIONS, "torch"),
    "attention": partial(_spelled, _ATTENTION, ""),
}


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a file, as (line number, text). Raises Malformed.

    Only a line feed ends a line: JSON texts may contain other line separators.
    """
    text = contents(path, largest=LARGEST).removeprefix(codecs.BOM_UTF8)
    return ((number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip())


def read(path: Path) -> ParallelPlan:
    """The plan in a file. Raises PartcError P0804."""
    try:
        document = parsed(contents(path, largest=LARGEST))
    except Malformed as error:
        raise _unreadable(str(path), error) from None
    if isinstance(document, dict) and "partc" in document:
        help = "`partc replan` plans a package anew; `partc plan -o` writes plans for partc compile"
        raise PartcError("P0804", f"{path} is the plan of a package, with the results of its compile", help=help)
    return ParallelPlan.of(normalised_document(document), place=str(path))


def decisions(plan: ParallelPlan) -> dict[str, Any]:
    """The options of `partc compile` that a plan decides, in click's form."""
    plan.check_emitted()
    names = [item.name for item in fields(ParallelPlan) if item.name not in _NOT_COMPILED]
    found = {name: getattr(plan, name) for name in names} | {"zero": str(plan.zero)}
    definitions = tuple(f"{name}={value}" for name, value in plan.definitions.items())
    kept = {name: value for name, value in found.items() if value is not None}
    return {**kept, "definitions": definitions}


def check_undecided(given: Iterable[str], cluster: object) -> None:
    """Check that `--mesh auto` has a cluster, and that no decision of the planner is given. Raises PartcError P0815 and
    P0816.
    """
    if cluster is None:
        raise PartcError("P0816", "--mesh auto needs a cluster", help="add --cluster 8xH100-80GB or a FILE.toml")
    for name in given:
        if name in DECIDED and name not in ("mesh", "kernels"):
            flag = f"--{name.replace('_', '-')}"
            raise PartcError("P0815", f"{flag} is given, and --mesh auto decides it", help="restrict it by --fix")


def check_unplanned(given: Mapping[str, Any]) -> None:
    """Check that no option of the planner is given together with a mesh. Raises PartcError P0816."""
    for name, value in given.items():
        if value not in (None, "", ()):  # 0 was given
            flag = f"--{name.replace('_', '-')}"
            raise PartcError("P0816", f"{flag} is for --mesh auto", help=f"give --mesh auto, or leave {flag} out")


def _unreadable(place: str, error: Exception) -> PartcError:
    shape = '{"mesh": "pp=2,dp=4,tp=8", "microbatches": 8}'
    return PartcError("P0804", f"{place}: {error}", help=f"a plan is a JSON object such as {shape}")
