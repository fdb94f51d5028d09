"""The steps of other data-parallel systems on fake CUDA tensors, counted as ours are.

Each trains with gradient accumulation over the micro-batches, in bf16 with fp32 weights, and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import distributed as ddp

from plugins.hybrid_parallel.data.microbatch import split_batch, to_device
from plugins.hybrid_parallel.inspect.shard_report import playing
from plugins.hybrid_parallel.planner.proxy_model import give_memory, quiet
from zoo_tests.cuda_trace.recorder import StepCounts, StepRecorder, record_wait
from zoo_tests.cuda_trace.steps import CUDA, STEPS, Trace, stand_ins
from zoo_tests.zoo import FAMILIES

Batch = Mapping[str, Any]
Backward = Callable[[Batch, bool], None]  # (micro-batch, whether it is the last) -> None


def counts_of(trace: Trace) -> StepCounts:
    """Count one step of `trace.system`: the micro-batches, AdamW and `zero_grad()`."""
    family, count = FAMILIES[trace.family], trace.options["num_microbatches"]
    model = family.build(family.main_head, torch.float32, **trace.config).to("meta")
    model.config.use_cache = False
    batch = family.batch(family.main_head, 0, trace.rows, torch.float32)
    with ExitStack() as stack:
        stack.enter_context(playing(trace.rank, trace.world_size))
        stack.enter_context(stand_ins([]))
        stack.enter_context(_streams())
        stack.enter_context(quiet())
        mesh = init_device_mesh(CUDA.type, (trace.world_size,))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        give_memory(model, CUDA)
        model.train()
        backward = _SYSTEMS[trace.system](model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        given = {key: mode.from_tensor(each) if isinstance(each, Tensor) else each for key, each in batch.items()}
        for _ in range(STEPS):
            with StepRecorder() as recorder:
                for index, part in enumerate(split_batch(to_device(given, CUDA, None), count)):
                    backward(part, index == count - 1)
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
    for layer in model.model.layers:
        fully_shard(layer, **options)
    wrapped = fully_shard(model, **options)

    def backward(batch: Batch, is_last: bool) -> None:
        wrapped.set_requires_gradient_sync(is_last)
        wrapped(**batch).loss.backward()

    return backward


_SYSTEMS: Mapping[str, Callable[[nn.Module, DeviceMesh], Backward]] = {
    "DDP": _data_parallel,
    "FSDP2": _fully_sharded,
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
    }
    patches: AbstractContextManager[Any] = mock.patch.multiple(torch.cuda, **answers)
    with patches:
        yield
