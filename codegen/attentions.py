"""The attention operations of a finished program, as cases for the choice of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from partc.errors import Source
from partc.ir.operators import DTYPE_NAMES, DTYPES
from partc.ir.program import Op, Program, Ref, Region
from partc.rules.rule import integers
from partc.runtime.ops.attention import SMALL
from partc.runtime.ops.attention_kernels import GOOD_CUDNN, Case, Gpu, on_gpu

_BEST = Gpu(capability=(9, 0), cudnn=GOOD_CUDNN)  # the GPU with the most kernels to choose from


def attentions(program: Program) -> dict[str, tuple[Case, Source | None]]:
    """Map `region.result` to the attention that one rank computes for one microbatch, and its line in the model."""
    return {
        f"{region.name}.{op.results[0].name}": (_case(op, region, program.sizes), op.source)
        for region in program.regions
        for op in region.forward.ops
        if op.name in ("attention", "attention_dropout")
    }


def documents(program: Program) -> dict[str, dict[str, Any]]:
    """The attention cases as JSON for plan.json; `runtime.attention_kernels.cases` reads it."""
    return {
        place: {field: getattr(case, field) for field in Case.__dataclass_fields__} | {"dtype": DTYPE_NAMES[case.dtype]}
        for place, (case, _) in attentions(program).items()
    }


def without_kernel(program: Program) -> Iterator[str]:
    """Warnings about attention that no fused GPU kernel supports; none in fp64, which is for verification."""
    found: dict[str, list[str]] = {}
    for place, (case, source) in attentions(program).items():
        choice = on_gpu(case, _BEST)
        if choice.kernel is None and case.dtype != DTYPES["f64"]:
            where = place if source is None else f"{source.file}:{source.line}"
            names: dict[str, list[str]] = {}
            for name, reason in choice.passed:
                names.setdefault(reason, []).append(name)
            reasons = (f"{', '.join(each)}: {reason}" for reason, each in names.items())
            found.setdefault("; ".join(reasons), []).append(where)
    for reason, places in found.items():
        yield (
            f"{', '.join(dict.fromkeys(places))}: on GPUs attention runs in blocks of plain operations here, several "
            f"times slower than in a fused kernel ({reason})"
        )


def _case(op: Op, region: Region, sizes: Mapping[str, int]) -> Case:
    types = region.types(region.forward)
    q, k, v = (types[arg.name].layout.local_shape(sizes) for arg in op.args[:3] if isinstance(arg, Ref))
    kept = {value.name for value in op.results[1:]}  # log-sum-exps that backward reads
    backward = [each for graph in region.graphs[1:] for each in graph.ops if kept.intersection(each.refs())]
    dtype = next(types[arg.name].dtype for arg in op.args[:1] if isinstance(arg, Ref))
    mask, limits, elements = op.args[3], dict(op.attrs).get("limits"), 0
    if isinstance(limits, Ref):
        elements = max(q[0], types[limits.name].layout.local_shape(sizes)[0]) * q[-2] * k[-2]
        added = isinstance(mask, Ref) and types[mask.name].dtype != "bool"
        elements = elements if elements > SMALL or added else 0
    return Case(
        dtype=DTYPES[dtype],
        heads=q[-3] if len(q) > 2 else 1,
        groups=k[-3] if len(k) > 2 else 1,
        s=q[-2],
        t=k[-2],
        d=q[-1],
        e=v[-1],
        masked=mask is not None or limits is not None,
        learned=any(each.name.endswith("_bias_backward") for each in backward),
        causal=op.args[4] is True,
        drops=op.name == "attention_dropout",
        window=next(iter(integers(op.args[6])), 0) if len(op.args) > 6 else 0,
        limits=elements,
    )
