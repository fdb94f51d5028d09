"""Experts of one layer as a loop and as grouped matrix products, forward and backward, in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.harness import ratio, run_ranks, table, turns

HIDDEN, INTERMEDIATE, TOKENS, CHOICES = 256, 512, 512, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(dtype: str, num_experts: int, repeats: int) -> tuple[float, float]:
    """Return the speed of grouped products over that of the loop, and the largest relative difference of a gradient."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    config = MixtralConfig(**sizes, num_local_experts=num_experts, num_experts_per_tok=CHOICES)
    experts = MixtralExperts(config).to(DTYPES[dtype])
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.05)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=DTYPES[dtype])
    index = torch.rand(TOKENS, num_experts).topk(CHOICES).indices
    weights = torch.rand(TOKENS, CHOICES, dtype=DTYPES[dtype])
    gradients: dict[str, list[Tensor]] = {}

    def work(implementation: str) -> Callable[[], None]:
        def run() -> None:
            experts.zero_grad()
            config._experts_implementation = implementation
            experts(hidden, index, weights).float().square().sum().backward()
            gradients[implementation] = [parameter.grad.float() for parameter in experts.parameters()]

        return run

    times = turns({name: work(name) for name in ("grouped_mm", "eager")}, repeats)
    pairs = zip(gradients["grouped_mm"], gradients["eager"], strict=True)
    return ratio(times, "grouped_mm", "eager"), max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def report(quick: bool) -> str:
    repeats = 1 if quick else 5
    rows = [[dtype, count, *run_ranks(measure, 1, dtype, count, repeats)] for dtype in DTYPES for count in (8, 64)]
    return table(
        f"Experts in grouped matrix products, {TOKENS} tokens of {CHOICES} choices",
        ["precision", "experts", "speed over the loop", "largest difference of a gradient"],
        [[*row[:-1], f"{row[-1]:.1e}"] for row in rows],
    )
