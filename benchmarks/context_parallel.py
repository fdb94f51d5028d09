"""Step time of two context-parallel ranks against the unsharded model on one thread.

LlamaForCausalLM, 4 layers, hidden 512, 8 heads of 64, vocabulary 8192, batch 1, forward and backward, one thread per
rank. The limit is 2.0. The unsharded model runs on rank 0 while rank 1 waits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import ratio as ratio_of
from benchmarks.harness import run_ranks, table, turns
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

LENGTHS = (512, 1024, 2048, 4096)
WAYS: dict[str, dict[str, Any]] = {
    "cp2, ring": {"cp_size": 2},
    "cp2, all-to-all": {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "tp2": {"tp_size": 2},
}


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=2048,
        max_position_embeddings=4096,
        vocab_size=8192,
        use_cache=False,
    )


def _boosted(whole: LlamaForCausalLM, options: dict[str, Any]) -> Callable[[torch.Tensor], None]:
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = copy.deepcopy(whole)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def step(ids: torch.Tensor) -> None:
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
        optimizer.zero_grad()

    return step


def measure(lengths: tuple[int, ...], repeats: int) -> list[list[object]]:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config())
    steps = {name: _boosted(whole, options) for name, options in WAYS.items()}
    rows: list[list[object]] = []
    for length in lengths:
        ids = torch.randint(1, 8192, (1, length))

        def alone() -> None:
            if dist.get_rank() == 0:
                whole(input_ids=ids, labels=ids).loss.backward()  # noqa: B023
                whole.zero_grad()

        ways = {"whole": alone, **{name: (lambda step=step: step(ids)) for name, step in steps.items()}}  # noqa: B023
        found = turns(ways, repeats)
        rows.append([length, *(ratio_of(found, name, "whole") for name in WAYS)])
    return rows


def report(quick: bool) -> str:
    lengths, repeats = ((256, 512), 3) if quick else (LENGTHS, 7)
    rows = run_ranks(measure, 2, lengths, repeats)
    return table(
        "Context parallelism: times as fast as the unsharded model (2 ranks, limit 2.0)",
        ["tokens of a sequence", *WAYS],
        rows,
        "The loss is included. The context-parallel runs never compute the logits of whole sequences; the unsharded "
        "model does.",
    )
