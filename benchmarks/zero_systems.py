"""Training systems that `zero_step` and `zero_stages` compare: ours, DDP, FSDP2 (with DTensor), and DeepSpeed.

Each is a function that takes the model and returns a training step: batch -> loss.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

Batch = Mapping[str, Tensor]
Step = Callable[[Batch], Tensor]
LEARNING_RATE = 1e-4


def bert(layers: int) -> nn.Module:
    """Create BERT-base without dropout, so that every system has the same losses."""
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config)


def llama(layers: int) -> nn.Module:
    """Create a Llama of hidden size 768."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def ours(model: nn.Module, zero_stage: int = 1, **options: Any) -> Step:
    """Return a step with ZeRO of this package."""
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=zero_stage, **options))
    model, optimizer = booster.boost(model, _adamw(model))

    def step(batch: Batch) -> Tensor:
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def data_parallel(model: nn.Module) -> Step:
    """Return a step with torch's DistributedDataParallel, and AdamW on every rank."""
    return _data_parallel(model, _adamw(model))


def zero_redundancy(model: nn.Module) -> Step:
    """Return a step with DistributedDataParallel and torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
    )
    return _data_parallel(model, optimizer)


def fully_sharded(model: nn.Module, reshard: bool = False) -> Step:
    """Return a step with FSDP2; without `reshard` it keeps whole parameters from forward to backward, as ZeRO-1."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _loop(model, _adamw(model))


def tensor_and_fully_sharded(model: nn.Module, reshard: bool = True) -> Step:
    """Return a step of a Llama with DTensor's tensor parallelism over pairs of ranks, and FSDP2 over the pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
    # The fused kernel does not take parameters with and without tensor parallelism together.
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False))


def deepspeed_zero(model: nn.Module, stage: int = 1) -> Step:
    """Return a step with DeepSpeed's ZeRO and torch's AdamW."""
    os.environ.setdefault("DS_ACCELERATOR", device().type)
    import deepspeed

    ranks = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks,
        "zero_optimization": {"stage": stage, "overlap_comm": device().type == "cuda"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    deepspeed.init_distributed("nccl" if device().type == "cuda" else "gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)

    def step(batch: Batch) -> Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[[nn.Module], Step]] = {
    "ours": ours,
    "DDP + fused AdamW": data_parallel,
    "DDP + ZeroRedundancyOptimizer": zero_redundancy,
    "FSDP2, reshard_after_forward=False": fully_sharded,
    "DeepSpeed ZeRO-1": deepspeed_zero,
}


# Systems by what ranks shard, for `zero_stages`.
STAGES: dict[str, Callable[[nn.Module], Step]] = {
    "ours, stage 1": ours,
    "ours, stage 2": partial(ours, zero_stage=2),
    "ours, stage 3": partial(ours, zero_stage=3),
    "DDP + fused AdamW": data_parallel,
    "FSDP2, reshard_after_forward=False": fully_sharded,
    "FSDP2": partial(fully_sharded, reshard=True),
    "DeepSpeed ZeRO-2": partial(deepspeed_zero, stage=2),
    "DeepSpeed ZeRO-3": partial(deepspeed_zero, stage=3),
}

# The same over two tensor-parallel ranks, or two stages.
COMBINED: dict[str, Callable[[nn.Module], Step]] = {
    "ours, tp2, stage 1": partial(ours, tp_size=2),
    "ours, tp2, stage 2": partial(ours, tp_size=2, zero_stage=2),
    "ours, tp2, stage 3": partial(ours, tp_size=2, zero_stage=3),
    "ours, pp2, stage 2": partial(ours, pp_size=2, zero_stage=2, num_microbatches=4),
    "ours, pp2, stage 3": partial(ours, pp_size=2, zero_stage=3, num_microbatches=4),
    "FSDP2 + DTensor tp2, reshard_after_forward=False": partial(tensor_and_fully_sharded, reshard=False),
    "FSDP2 + DTensor tp2": tensor_and_fully_sharded,
}


def is_installed(name: str) -> bool:
    """Return whether this system is installed."""
    return not name.startswith("DeepSpeed") or importlib.util.find_spec("deepspeed") is not None


def _data_parallel(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return _loop(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
