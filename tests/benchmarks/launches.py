"""Triton launches of a transformer block, and torch.compile's: `python tests/benchmarks/launches.py`.

Blocks of Hugging Face models in bf16, forward and backward, on one device. partc's are those of the compiled region;
torch.compile's are counted as its backend writes them for the same module (torch's defaults, parameters in bf16), with
a target of sm_90 that nothing runs on: no GPU is needed, and launches do nothing. Products and attention are torch's
own on both sides and don't count.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import partc
from partc.ir.operations import VIEWS
from partc.ir.program import Graph, Op, Region

TOKENS = {"batch": 1, "seq": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    config: dict[str, Any]
    block: Callable[[torch.nn.Module], torch.nn.Module]


CASES = (
    Case(
        name="Llama, width 2048",
        config={
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        },
        block=lambda model: model.model.layers[0],
    ),
    Case(
        name="GPT-2, width 768",
        config={
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 512, "n_embd": 768, "n_layer": 2,
            "n_head": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        block=lambda model: model.transformer.h[0],
    ),
)  # fmt: skip


def ours(case: Case, folder: Path) -> tuple[str, str]:
    """Forward and backward: kernels of a block, the launches of PyTorch in addition, and what it launches without.

    Products and attention apart. A gradient of a weight or a bias that a kernel's programs have parts of, PyTorch sums
    into its buffer: a launch more. It sums several of one kernel together, and writes them to their buffers: two more.
    """
    (folder / "config.json").write_text(json.dumps(case.config))
    fused, plain = (_block(f"hf:{folder / 'config.json'}", kernels) for kernels in ("triton", "aten"))
    params = {f"grad_{value.name}" for value in fused.params}

    def counted(graph: Graph, without: Graph) -> str:
        kernels = [op for op in graph.ops if op.name == "fused"]
        sums = (sum(value.name in params for value in op.results) for op in kernels)
        rest = len(_others(graph)) - len(kernels) + sum(min(count, 2) for count in sums)
        return f"{len(kernels)} + {rest} (for {len(_others(without))})"

    assert fused.backward is not None and plain.backward is not None
    return counted(fused.forward, plain.forward), counted(fused.backward, plain.backward)


def _block(source: str, kernels: str) -> Region:
    program = partc.compile(source, mesh="1", precision="bf16", kernels=kernels, options=TOKENS).program
    return max(program.regions, key=lambda region: sum(call.region == region.name for call in program.calls))


def _others(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if not (_is_product(op) or op.name in VIEWS)]


def _is_product(op: Op) -> bool:
    return op.name.startswith(("linear", "matmul", "attention"))


class _Nobody:
    """A GPU that code is written for, and that nothing runs on."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class _Kernel:
    """One whose launches are counted."""

    launches = 0

    def run(self, *args: Any, **options: Any) -> None:
        _Kernel.launches += 1


def compiled(case: Case) -> tuple[int, int]:
    """The launches under torch.compile."""
    import torch._inductor.config
    import triton
    from torch._inductor.async_compile import AsyncCompile
    from transformers import AutoConfig, AutoModelForCausalLM

    triton.runtime.driver.set_active(_Nobody())
    AsyncCompile.triton = lambda *args, **options: _Kernel()
    torch._inductor.config.cpu_backend = "triton"
    torch._inductor.config.force_pointwise_cat = True  # as it does on GPUs
    torch._inductor.config.fx_graph_cache = False
    torch._dynamo.reset()
    _Kernel.launches = 0
    config = AutoConfig.for_model(**case.config)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    block = case.block(model)
    with block.register_forward_pre_hook(lambda _, args, kwargs: caught.append((args, kwargs)), with_kwargs=True):
        ids = torch.zeros(TOKENS["batch"], TOKENS["seq"], dtype=torch.int64)
        model(input_ids=ids, use_cache=False)
    (x, *rest), options = caught[0]
    x = x.detach().requires_grad_()
    made = torch.compile(block)(x, *rest, **options)
    made = made[0] if isinstance(made, tuple) else made
    forward = _Kernel.launches
    made.backward(torch.zeros_like(made))
    return forward, _Kernel.launches - forward


def main() -> None:
    print("| block | partc, forward | torch.compile | partc, backward | torch.compile |")
    print("|---|---:|---:|---:|---:|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            forward, backward = ours(case, Path(folder))
        theirs = compiled(case)
        print(f"| {case.name} | {forward} | {theirs[0]} | {backward} | {theirs[1]} |", flush=True)


if __name__ == "__main__":
    main()
