"""pp2 1F1B with 8 micro-batches against the ideal and against `torch.distributed.pipelining` on the same stages.

The ideal is (m + p - 1) / m * t1 / p, where t1 is the time of the whole model on one rank while the other rank runs
the same, so that both see the same memory bandwidth. Efficiency is ideal / measured, the median over the turns.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForSequenceClassification

from benchmarks.harness import ratio, run_ranks, table, turns
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from shardformer import PipelineStageManager, ShardConfig, ShardFormer
from shardformer.stages.stage import run_stage

MICROBATCHES, ROWS, LENGTH = 8, 4, 128


class StageModule(nn.Module):
    """One of our stages with the interface of torch's pipelining: tensor in, tensor out."""

    def __init__(self, model: nn.Module, is_first: bool, ids: Tensor) -> None:
        super().__init__()
        self.model, self.is_first, self.ids = model, is_first, ids

    def forward(self, x: Tensor) -> Tensor:
        inputs = {"input_ids": x if self.is_first else self.ids, "use_cache": False}
        output = run_stage(self.model, None if self.is_first else (x,), inputs)
        return output[0] if isinstance(output, tuple) else output.logits


def measure(repeats: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=256,
        num_labels=2,
        pad_token_id=0,
    )
    whole = LlamaForSequenceClassification(config)
    rank = dist.get_rank()
    stage, _ = ShardFormer(
        ShardConfig(enable_tensor_parallelism=False, pipeline_stage_manager=PipelineStageManager(rank, 2))
    ).optimize(copy.deepcopy(whole))
    ids = torch.randint(1, 256, (MICROBATCHES, ROWS, LENGTH))
    labels = torch.randint(0, 2, (MICROBATCHES, ROWS))

    def alone() -> None:
        for index in range(MICROBATCHES):
            F.cross_entropy(whole(input_ids=ids[index], use_cache=False).logits, labels[index]).backward()
        whole.zero_grad()

    runtime = PipelineRuntime(stage, build_mesh(2, 1, 1, 1))
    schedule = runtime.turns(MICROBATCHES, trains=True)
    inputs: list[dict[str, Any]] = [{"input_ids": ids[index], "use_cache": False} for index in range(MICROBATCHES)]

    def ours() -> None:
        runtime.begin(inputs, lambda out, i: F.cross_entropy(out.logits, labels[i])).execute(schedule)
        stage.zero_grad()

    module = StageModule(stage, rank == 0, ids[0])
    schedule = Schedule1F1B(
        PipelineStage(module, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=F.cross_entropy, scale_grads=False
    )

    def theirs() -> None:
        if rank == 0:
            schedule.step(ids.flatten(0, 1))
        else:
            schedule.step(target=labels.flatten(), losses=[])
        stage.zero_grad()

    return turns({"whole": alone, "ours": ours, "torch": theirs}, repeats, warm_up=2)


def report(quick: bool) -> str:
    times = run_ranks(measure, 2, 3 if quick else 41)
    share = (MICROBATCHES + 1) / MICROBATCHES / 2

    def efficiency(name: str) -> float:
        return statistics.median(whole * share / step for whole, step in zip(times["whole"], times[name], strict=True))

    rows: list[list[object]] = [
        ["ours", efficiency("ours")],
        ["torch.distributed.pipelining", efficiency("torch")],
        ["ours / torch, turn by turn", ratio(times, "ours", "torch")],
    ]
    return table(
        "Pipeline parallelism: efficiency of 1F1B, pp2, 8 micro-batches (ideal 1.0)", ["runtime", "efficiency"], rows
    )
