"""One peer of the package, in a process of its own: `peer.py NAME config.json BATCH SEQ WARM STEPS OUT.json`.

All train the model of the configuration in bf16 with fused AdamW on parameters in fp32, as the package does: under
autocast, or with copies of the parameters where the model has experts, since autocast leaves grouped products in fp32.
`liger` is eager with Liger's kernels in place of the model's, fused cross-entropy included; GPT-2, which Liger has no
patch for, gets its norms and its cross-entropy.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(peer: str, path: str, batch: int, seq: int, warm: int, steps: int, out: str) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = AutoConfig.from_pretrained(path)
    if peer == "liger" and config.model_type != "gpt2":
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{config.model_type}")()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if peer == "liger" and config.model_type == "gpt2":
        _patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    copied = hasattr(config, "num_experts")
    run = Copied(model) if copied else model
    if peer in ("compile", "max-autotune"):
        run = torch.compile(run, mode="default" if peer == "compile" else peer)
    ids = torch.randint(config.vocab_size, (batch, seq), device="cuda")
    seconds = []
    for step in range(warm + steps):
        torch.cuda.synchronize()
        if step == warm:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not copied):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    taken = sorted(seconds[warm:])
    found = {"speed": batch * seq / taken[len(taken) // 2], "peak": torch.cuda.max_memory_allocated()}
    Path(out).write_text(json.dumps(found))


class Copied(torch.nn.Module):
    """A model that computes with copies of its parameters in bf16."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: object) -> object:
        copies = {name: parameter.to(torch.bfloat16) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, copies, (), batch)


def _patch(model: torch.nn.Module) -> None:
    """Liger's norms and cross-entropy, as its own patches of other models put them in."""
    from liger_kernel.transformers.functional import liger_cross_entropy, liger_layer_norm
    from transformers.loss import loss_utils

    loss_utils.nn.functional.cross_entropy = liger_cross_entropy
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.forward = lambda x, norm=module: liger_layer_norm(x, norm.weight, norm.bias, norm.eps)


if __name__ == "__main__":
    name, path, *numbers, out = sys.argv[1:]
    batch, seq, warm, steps = map(int, numbers)
    main(name, path, batch, seq, warm, steps, out)
