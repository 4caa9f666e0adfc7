"""Cases of the search: their description, how they are drawn, and the properties that each must have."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import torch
from hypothesis import strategies as st

import partc
from partc.errors import PartcError
from partc.ir.parser import parse
from partc.ir.printer import print_program
from partc.schedules import SCHEDULES
from tests.fuzz.model import Fuzzed, Step

KINDS = [
    "linear",
    "gate",
    "mlp",
    "norm",
    "shared",
    "keep",
    "skip",
    "attention",
    "conv",
    "batch_norm",
    "dropout",
    "scale",
    "swap",
    "halves",
    "center",
    "largest",
    "softmax",
    "mix",
    "einsum",
    "roll",
    "cumsum",
    "shift",
    "stack",
    "where",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch, a mesh, and how to use it."""

    steps: tuple[Step, ...]
    last: tuple[Step, ...]
    repeat: int
    width: int
    vocabulary: int
    ties: int
    rows: int
    length: int
    mesh: str
    microbatches: int
    schedule: str
    shard: tuple[str, ...]
    zero: int = 0
    recompute: str = "none"
    bucket: str = "25MB"
    nodes: int | None = None
    kernels: str = "auto"
    compress_grads: str = "none"
    loss_chunks: int = 1
    eval_every: int = 0
    tables: int = 0  # with row-wise updates

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Case:
        """The case of a printed line."""
        given = json.loads(text)
        for key in ("steps", "last"):
            given[key] = tuple((kind, number) for kind, number in given[key])
        return cls(**given | {"shard": tuple(given["shard"])})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small ones first: hypothesis shrinks towards the start of every list."""
    steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=5).map(tuple)
    sizes = {name: draw(st.sampled_from((1, 1, 2, 2, 3, 4))) for name in ("pp", "dp", "tp")}
    sizes["cp"] = draw(st.sampled_from((1, 1, 1, 2, 3)))
    while math.prod(sizes.values()) > 16:
        largest = max(sizes, key=lambda name: sizes[name])
        sizes[largest] //= 2
    order = draw(st.permutations(tuple(sizes)))
    schedule = draw(st.sampled_from(("1f1b", *SCHEDULES))) if sizes["pp"] > 1 else "1f1b"
    microbatches = draw(st.sampled_from((1, 2, 3, 4)))
    stages = sizes["pp"] * SCHEDULES[schedule].stages_per_rank
    pins = ((), (), (), ("head.weight=[@tp, _]",), ("shared.weight=[_, @tp]",), ("blocks.*.0.weight=[_, _]",))
    return Case(
        steps=draw(steps),
        last=draw(steps),
        repeat=draw(st.integers(max(1, stages - 2), max(1, stages - 2) + 2)),
        width=draw(st.sampled_from((4, 6, 8, 12))),
        vocabulary=draw(st.sampled_from((8, 12, 13, 24))),
        ties=draw(st.integers(0, 4)),
        rows=sizes["dp"] * microbatches * draw(st.sampled_from((1, 2))),
        length=draw(st.sampled_from((2, 3, 4, 6))),
        mesh=",".join(f"{name}={sizes[name]}" for name in order),
        microbatches=microbatches,
        schedule=schedule,
        shard=draw(st.sampled_from(pins)),
        zero=draw(st.sampled_from((0, 0, 1, 2, 3))),
        recompute=draw(st.sampled_from(("none", "selective", "full", "50KB", "200KB"))),
        bucket=draw(st.sampled_from(("25MB", "0B", "500B"))),
        nodes=draw(st.sampled_from((None, None, 2, 4))),
        kernels=draw(st.sampled_from(("auto", "triton"))),
        compress_grads=draw(st.sampled_from(("none", "none", "none", "int8"))),
        loss_chunks=draw(st.sampled_from((1, 1, 1, 2))),
        eval_every=draw(st.sampled_from((0, 0, 1))),
        tables=draw(st.sampled_from((0, 0, 0, 2, 3))),
    )


# Nodes that do not fit, pins and budgets that cannot be met, more stages than calls, losses without chunks, and
# evaluations that the training's stages cannot run.
REFUSALS = ("P0105", "P0302", "P0303", "P0304", "P0403", "P0415", "P0418", "P0420")


def run(case: Case) -> str:
    """Compile, verify, print and parse. Returns the code of a refusal, or "". Raises AssertionError."""
    torch.manual_seed(case.rows)
    model = Fuzzed(case.steps, case.last, case.repeat, case.width, case.vocabulary, case.ties, case.tables)
    labels = torch.randint(case.vocabulary, (case.rows, case.length))
    ignored = torch.rand(labels.shape) < 0.3
    ignored[:, 0] = False
    batch = {
        "ids": torch.randint(case.vocabulary, (case.rows, case.length)),
        "labels": labels.masked_fill(ignored, -100),
    }
    try:
        package = partc.compile(
            model,
            batch,
            mesh=case.mesh,
            microbatches=case.microbatches,
            schedule=case.schedule,
            shard=case.shard,
            precision="fp64",
            zero=case.zero,
            recompute=case.recompute,
            bucket=case.bucket,
            nodes=case.nodes,
            kernels=case.kernels,
            compress_grads=case.compress_grads,
            loss_chunks=case.loss_chunks,
            eval_every=case.eval_every,
            group=["tables.*:optimizer=rowwise_adagrad"] if case.tables else [],
        )
    except PartcError as error:
        assert error.code in REFUSALS, f"{error}"
        return error.code
    text = print_program(package.program)
    assert print_program(parse(text)) == text, "the text does not read back"
    result = package.verify(steps=2)
    assert result.ok, f"differs: {result.worst}"
    return ""
