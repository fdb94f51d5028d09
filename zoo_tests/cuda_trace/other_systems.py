"""The steps of other data-parallel systems on fake CUDA tensors, counted as ours are.

Each trains with gradient accumulation over the micro-batches, in bf16 with fp32 weights, and AdamW.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import distributed as ddp

from booster.logging import quiet
from plugins.hybrid_parallel.data.microbatch import split_batch, to_device
from plugins.hybrid_parallel.planner.proxy_model import give_memory
from plugins.hybrid_parallel.shard_report import fake_rank
from zoo_tests.cuda_trace.recorder import StepCounts, StepRecorder, record_wait
from zoo_tests.cuda_trace.steps import CUDA, STEPS, Trace, stand_ins
from zoo_tests.zoo import FAMILIES

Batch = Mapping[str, Any]
_MICROBATCHES = 2
Backward = Callable[[Batch, bool], None]  # (micro-batch, whether it is the last) -> None


def counts_of(trace: Trace) -> StepCounts:
    """Count one step of `trace.system`: the micro-batches, AdamW and `zero_grad()`."""
    family, count = FAMILIES[trace.family], _MICROBATCHES
    with torch.device("meta"):
        model = family.build(family.main_head, torch.float32, **trace.config)
    model.config.use_cache = False
    batch = family.batch(family.main_head, 0, trace.rows, torch.float32)
    with ExitStack() as stack:
        stack.enter_context(fake_rank(trace.rank, trace.world_size))
        stack.enter_context(stand_ins([]))
        stack.enter_context(_streams())
        stack.enter_context(quiet())
        mesh = init_device_mesh(CUDA.type, (trace.world_size,))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        give_memory(model, CUDA)
        model.train()
        backward = _SYSTEMS[trace.system](model, mesh)
        own = trace.system == "DeepSpeed"  # which steps by itself
        optimizer = None if own else torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        given = {key: mode.from_tensor(each) if isinstance(each, Tensor) else each for key, each in batch.items()}
        for _ in range(STEPS):
            with StepRecorder() as recorder:
                for index, part in enumerate(split_batch(to_device(given, CUDA), count)):
                    backward(part, index == count - 1)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
    return recorder.counts


def _data_parallel(model: nn.Module, mesh: DeviceMesh) -> Backward:
    """Wrap the model in DistributedDataParallel, with autocast."""
    with mock.patch.object(ddp, "_verify_param_shape_across_processes", lambda *_: True):
        wrapped = ddp.DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    # Its C++ part reads memory that fake tensors do not have, to reorder buckets and to log times.
    wrapped.reducer, wrapped.logger = _SameBuckets(wrapped.reducer), mock.MagicMock()
    wrapped.register_comm_hook(None, _all_reduce)

    def backward(batch: Batch, is_last: bool) -> None:
        with nullcontext() if is_last else wrapped.no_sync():
            with torch.autocast(CUDA.type, torch.bfloat16):
                loss = wrapped(**batch).loss
            loss.backward()

    return backward


class _SameBuckets:
    """A reducer of DistributedDataParallel that keeps its first buckets."""

    def __init__(self, reducer: dist.Reducer) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _all_reduce(state, bucket):  # its annotations would have to be types, which they are not in this file
    """Reduce a bucket as the reducer does; the fake process group's own future has no result."""
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> Backward:
    """Shard every layer and the model by FSDP2; weights stay whole from the forward to the backward pass."""
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": False,
    }
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, **options)
    wrapped = fully_shard(model, **options)

    def backward(batch: Batch, is_last: bool) -> None:
        wrapped.set_requires_gradient_sync(is_last)
        wrapped(**batch).loss.backward()

    return backward


def _deepspeed_zero(model: nn.Module, mesh: DeviceMesh) -> Backward:
    """Train by DeepSpeed's ZeRO stage 1, whose engine also steps its optimizer."""
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("DS_ACCELERATOR", CUDA.type)
    import deepspeed
    from deepspeed.runtime.zero import stage_1_and_2 as zero

    for param in model.parameters():  # here, since fake parameters cannot be cast by `Module.to`
        param.data = param.data.bfloat16()
    model.to = model.bfloat16 = lambda *_, **__: model
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": _MICROBATCHES,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config)
    look = zero.DeepSpeedZeroOptimizer.has_overflow
    # Fake gradients have no values: the answers to its questions are that all is well.
    zero.DeepSpeedZeroOptimizer.has_overflow = lambda *args, **kwargs: look(*args, **kwargs) and False
    zero.is_invalid_grad_norm = lambda _: False

    def backward(batch: Batch, is_last: bool) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return backward


_SYSTEMS: Mapping[str, Callable[[nn.Module, DeviceMesh], Backward]] = {
    "DDP": _data_parallel,
    "FSDP2": _fully_sharded,
    "DeepSpeed": _deepspeed_zero,
}


class _Event:
    """An event that only says where the host waits for it."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        record_wait("synchronize")


class _Stream(_Event):
    """A stream that only says where the host waits for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: _Event) -> None:
        pass

    wait_stream = wait_event


@contextmanager
def _streams() -> Iterator[None]:
    """Answer what these systems ask of `torch.cuda`."""
    answers: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
        "current_device": lambda: CUDA.index,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "synchronize": lambda *_: record_wait("synchronize"),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0, name="H100"),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_: 0),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda *_: None),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
        stack.enter_context(mock.patch.multiple(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _nothing))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""
