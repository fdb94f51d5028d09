"""Step time of tp2 against the unsharded model on one thread, and against DTensor's `parallelize_module`.

LlamaForSequenceClassification, 4 layers, hidden 512, 8 heads of 64, batch 4, forward and backward, one thread per rank.
The limit is 2.0. The unsharded model runs on all ranks at once: each core then has its share of the memory bandwidth.
"""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from benchmarks.harness import medians, run_ranks, table
from shardformer import ShardConfig, ShardFormer

LENGTHS = (256, 512, 1024, 2048)
# Measured elsewhere with this setup, as quoted in the project's issue: ColossalAI 0.5.0 and DTensor.
QUOTED = {256: (1.42, 1.29), 512: (1.54, 1.51), 1024: (1.55, 1.50), 2048: (1.78, 1.69)}


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=2048,
        max_position_embeddings=4096,
        num_labels=2,
        pad_token_id=0,
    )


def with_dtensor(model: nn.Module) -> nn.Module:
    """Shard the same layers with torch's own tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
    plan = {f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in column}
    plan |= {f"model.layers.*.self_attn.{name}": RowwiseParallel() for name in row}
    plan |= {f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {"model.layers.*.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def sharded(whole: nn.Module, **options: bool) -> nn.Module:
    """A copy of the model, sharded by this library."""
    return ShardFormer(ShardConfig(**options)).optimize(copy.deepcopy(whole))[0]


def measure(lengths: tuple[int, ...], repeats: int) -> list[list[object]]:
    torch.manual_seed(0)
    whole = LlamaForSequenceClassification(config())
    models = {
        "tp": sharded(whole),
        "sp": sharded(whole, enable_sequence_parallelism=True),
        "overlap": sharded(whole, enable_sequence_parallelism=True, enable_sequence_overlap=True),
        "dtensor": with_dtensor(copy.deepcopy(whole)),
    }
    rows: list[list[object]] = []
    for length in lengths:
        ids, labels = torch.randint(1, 32000, (4, length)), torch.randint(0, 2, (4,))

        def step(model: nn.Module) -> None:
            model(input_ids=ids, labels=labels).loss.backward()  # noqa: B023
            model.zero_grad()

        def alone() -> None:
            if dist.get_rank() == 0:
                step(whole)  # noqa: B023

        ways = {name: partial(step, model) for name, model in models.items()}
        found = medians({"alone": alone, "both": partial(step, whole), **ways}, repeats)
        fair = [found["both"] / found[name] for name in models]
        row = [length, *fair, found["alone"] / found["tp"], *QUOTED.get(length, ("-", "-"))]
        rows.append(row)
        if dist.get_rank() == 0:  # a row takes minutes
            print(*row, file=sys.stderr, flush=True)
    return rows


def report(quick: bool) -> str:
    lengths, repeats = ((256, 512), 3) if quick else (LENGTHS, 3)
    rows = run_ranks(measure, 2, lengths, repeats)
    columns = [
        "N_CTX",
        "tp2",
        "tp2, sequence parallelism",
        "and overlap",
        "DTensor",
        "tp2 against an idle second core",
        "ColossalAI 0.5.0, quoted",
        "DTensor, quoted",
    ]
    note = (
        "Both cores run the unsharded model at once, so that it has the memory bandwidth and clock rate that a rank "
        "of tp2 has. Against one that has the machine for itself (the last measured column) ratios above 2.0 are "
        "possible, since the second core brings caches and bandwidth of its own; the quoted figures are of that kind."
    )
    return table("Tensor parallelism: times as fast as the unsharded model (tp2, limit 2.0)", columns, rows, note)
