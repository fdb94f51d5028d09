"""A script of a library's own calls, without the league: does a class crash, or differ, there too?

    PYTHONPATH=.:environments/nemo-automodel OMP_NUM_THREADS=1 \\
        torchrun --nproc-per-node 2 -m benchmarks.league.by_hand automodel qwen3_moe/Qwen3MoeForCausalLM
    PYTHONPATH=.:environments/deepspeed … deepspeed wavlm/WavLMForAudioFrameClassification

It takes the tiny model and the batch of the census, shards the model over two tensor-parallel ranks, runs one forward
and backward pass, and prints the message of an error, or each gradient that is not that of plain transformers.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config

_TIMEOUT = timedelta(seconds=120)
_ROWS, _TOLERANCE = 6, 1e-3

Sharded = tuple[nn.Module, Callable[[Tensor], None]]  # a model, and how to run the backward pass of its loss


def with_deepspeed(model: nn.Module) -> Iterator[Sharded]:
    """AutoTP for training."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
    sizes = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=model, config=sizes | {"zero_optimization": {"stage": 0}})
    yield engine.module, Tensor.backward


def with_automodel(model: nn.Module) -> Iterator[Sharded]:
    """NeMo Automodel's plan of the class, and FSDP2 over one rank."""
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.distributed.mesh_utils import _create_fsdp2_device_mesh
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
    from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.experimental import implicit_replication

    mesh, *_ = _create_fsdp2_device_mesh(ParallelismSizes(tp_size=2, pp_size=1), world_size=2)
    full = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    model = fsdp2_strategy_parallelize(model, mesh, mp_policy=full)

    def backward(loss: Tensor) -> None:
        loss.backward()
        synchronize_tp_replica_gradients([model], mesh)

    with implicit_replication():
        yield model, backward


_LIBRARIES = {"deepspeed": contextmanager(with_deepspeed), "automodel": contextmanager(with_automodel)}


def compare(library: str, family: str, name: str) -> list[str]:
    """Return what differs from plain transformers, by gradient, or the error."""
    module = f"transformers.models.{family}.modeling_{family}"
    config_class = getattr(importlib.import_module(module), name).config_class
    config = small_config(config_class(), TwinSizes(kv_heads=4, is_faithful=False))
    twin = TinyModel(module, name, config, torch.float32, most_parameters=None)
    plain = twin.build()
    batch, whole = twin.batch(plain, 0, _ROWS), copy.deepcopy(plain)
    plain(**batch).loss.backward()
    try:
        with _LIBRARIES[library](whole) as (model, backward):
            backward(model(**batch).loss)
            gradients = {key: _whole(each.grad) for key, each in model.named_parameters() if each.grad is not None}
    except Exception as error:  # any of a thousand classes may fail in its own way
        return [f"{type(error).__name__}: {error}"]
    differing = {
        key: float((gradients[key] - each.grad).abs().max() / each.grad.abs().max())
        for key, each in plain.named_parameters()
        if each.grad is not None and key in gradients and gradients[key].shape == each.grad.shape
    }
    return [f"the gradient of {key} differs by {by:.1e}" for key, by in differing.items() if by > _TOLERANCE]


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main(library: str, *classes: str) -> None:
    """Compare class after class; rank 0 tells."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    for each in classes:
        for line in compare(library, *each.split("/")) or ["equal, where a whole gradient can be read"]:
            if dist.get_rank() == 0:
                sys.stdout.write(f"{each}: {line}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
