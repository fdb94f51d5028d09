"""Optimizer state per rank under ZeRO-1, as a share of the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.harness import run_ranks, table
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin


def measure() -> tuple[int, int]:
    """Return the bytes on the fullest rank, and of one process that holds everything."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12))
    whole = 2 * sum(param.numel() * param.element_size() for param in model.parameters())
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=1))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    batch = {"input_ids": torch.randint(1, 30522, (2, 16)), "labels": torch.randint(0, 2, (2,))}
    booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    mine = sum(v.numel() * v.element_size() for v in states if isinstance(v, Tensor) and v.dim())
    fullest = torch.tensor(mine)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    return int(fullest), whole


def report(quick: bool) -> str:
    rows: list[list[object]] = []
    for dp_size in (1, 2, 4):
        mine, whole = run_ranks(measure, dp_size)
        rows.append([dp_size, mine / whole, f"{(mine * dp_size / whole - 1) * 100:.3f} %"])
    return table(
        "Optimizer state under ZeRO-1: share of the fullest rank",
        ["dp", "share of the whole", "above 1/dp"],
        rows,
    )
