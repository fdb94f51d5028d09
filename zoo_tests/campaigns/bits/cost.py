"""What a step costs with `reproducible=True`, over what it costs without, by turns on the same ranks."""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

ROWS, LENGTH, STEPS = 16, 128, 6
VOCABULARY, LAYERS, HEAD_SIZE = 4096, 4, 32


def seconds_of_steps(
    tp_size: int, pp_size: int, dp_size: int, unit: int, sequence_blocks: int | None, hidden_size: int
) -> tuple[float, float]:
    """Return the seconds of the fastest step on this rank, without and with the option.

    Args:
        unit: samples of a pass in both.
        sequence_blocks: the option.
        hidden_size: of the model.
    """
    layout = {"tp_size": tp_size, "pp_size": pp_size, "max_norm": 1.0, "seed": 3, "microbatch_size": unit}
    on = {"reproducible": True, "reproducible_unit": unit, "reproducible_sequence_blocks": sequence_blocks}
    plain, exact = _Job(dp_size, hidden_size, **layout), _Job(dp_size, hidden_size, **layout, **on)
    seconds = [(plain.step(), exact.step()) for _ in range(STEPS)]
    return min(first for first, _ in seconds), min(second for _, second in seconds)


class _Job:
    """A training of a small Llama."""

    def __init__(self, dp_size: int, hidden_size: int, **options: object) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 43 // 16,
            num_hidden_layers=LAYERS,
            num_attention_heads=hidden_size // HEAD_SIZE,
        )
        model = LlamaForCausalLM(config)
        self.booster = Booster(plugin=HybridParallelPlugin(**options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.booster.boost(model, optimizer)
        ids = torch.randint(VOCABULARY, (ROWS // dp_size, LENGTH))
        self.batch = {"input_ids": ids, "labels": ids}

    def step(self) -> float:
        """Run a step; return its seconds."""
        start = time.perf_counter()
        self.booster.execute_pipeline(iter([self.batch]), self.model, optimizer=self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start
