"""Loss curves of a small language model in fp32, bf16 and fp8, from the same weights and batches."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import run_ranks, table
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

PRECISIONS = ("fp32", "bf16", "fp8")
VOCABULARY, LENGTH, ROWS = 256, 64, 16


def measure(precision: str, steps: int) -> list[float]:
    """Return the loss of every step; a text is a noisy walk through a fixed random table."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    booster = Booster(plugin=HybridParallelPlugin(precision=precision))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(1)
    follows = torch.randint(VOCABULARY, (VOCABULARY,), generator=generator)
    losses = []
    for _ in range(steps):
        tokens = [torch.randint(VOCABULARY, (ROWS,), generator=generator)]
        for _ in range(LENGTH - 1):
            noise = torch.randint(VOCABULARY, (ROWS,), generator=generator)
            keeps = torch.rand(ROWS, generator=generator) < 0.9
            tokens.append(torch.where(keeps, follows[tokens[-1]], noise))
        ids = torch.stack(tokens, 1)
        result = booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
        losses.append(result.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def report(quick: bool) -> str:
    steps = 20 if quick else 300
    curves = {name: run_ranks(measure, 1, name, steps) for name in PRECISIONS}
    window = max(steps // 10, 1)
    rows: list[list[object]] = []
    for end in range(window, steps + 1, window):
        means = {name: sum(curve[end - window : end]) / window for name, curve in curves.items()}
        rows.append([end, *means.values(), f"{(means['fp8'] / means['bf16'] - 1) * 100:+.2f} %"])
    return table(
        f"Matrix products in 8 bit: the loss against other precisions, means of {window} steps",
        ["steps", *PRECISIONS, "fp8 against bf16"],
        rows,
        "Measured on the CPU, where 8-bit products are not faster; the rounding is the same as on a GPU.",
    )
