"""Runs training steps of a boosted model on fake CUDA tensors, as one rank of a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from transformers.utils import import_utils

from booster.logging import quiet
from plugins.hybrid_parallel.boosted import model as boosted_model
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.boosted.model_api import WholeModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed import mesh as meshes
from plugins.hybrid_parallel.loss.step_loss import CriterionStepLoss
from plugins.hybrid_parallel.pipeline import p2p
from plugins.hybrid_parallel.planner.proxy_model import give_memory
from plugins.hybrid_parallel.setup.model import shard_model, wrap_model
from plugins.hybrid_parallel.setup.optimizer import build_optimizer
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.step import passes as step_batch
from plugins.hybrid_parallel.step.passes import run_batch
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from shardformer.layers.experts import TokenDispatcher
from shardformer.utils.module_paths import names_of_parameters
from zoo_tests.cuda_trace.recorder import StepCounts, StepRecorder, record_wait
from zoo_tests.zoo import FAMILIES

CUDA = torch.device("cuda", 0)
STEPS = 2  # the last one is counted: by then shapes are known and buffers are allocated
_LARGE = 100  # batches that were seen before, so that no batch is compared across ranks


@dataclass(frozen=True)
class Trace:
    """One rank of one layout.

    Attributes:
        family: of the zoo.
        options: of the plugin.
        world_size: number of ranks.
        rank: the rank that is run.
        rows: samples of its batch.
        config: further values of the model's configuration.
        system: "ours", or one of `other_systems`, which take no options.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    rank: int = 0
    rows: int = 4
    config: dict[str, Any] = field(default_factory=dict)
    system: str = "ours"


def counts_of(trace: Trace) -> StepCounts:
    """Count one whole step of a rank: `execute_pipeline`, `optimizer.step()` and `zero_grad()`."""
    config = HybridParallelConfig.from_options(**trace.options)
    headers: list[p2p.Specs] = []
    stride = trace.world_size // config.parallel.pp_size
    for rank in range(trace.rank % stride, trace.rank, stride):  # earlier stages say what they send
        _run(trace, rank, config, headers)
    return _run(trace, trace.rank, config, headers)


def _run(trace: Trace, rank: int, config: HybridParallelConfig, headers: list[p2p.Specs]) -> StepCounts:
    """Run a rank; it takes the specs of what it receives from `headers`, and leaves there those of what it sends."""
    family = FAMILIES[trace.family]
    with torch.device("meta"):
        model = family.build(family.main_head, torch.float32, **trace.config)
    batch = family.batch(family.main_head, 0, trace.rows, torch.float32)
    criterion = family.heads[family.main_head].criterion
    with ExitStack() as stack:
        stack.enter_context(fake_rank(rank, trace.world_size))
        stack.enter_context(stand_ins(headers))
        grid = meshes.build_mesh(
            *config.parallel.mesh_shape(trace.world_size), ep_size=config.parallel.ep_size, device=CUDA
        )
        stack.enter_context(quiet())
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        boosted, optimizer = _boost(model, config, grid, mode)
        stack.enter_context(mode)
        given = {key: mode.from_tensor(each) if isinstance(each, Tensor) else each for key, each in batch.items()}
        for _ in range(STEPS):
            recorder = StepRecorder()
            with recorder:
                result = run_batch(boosted, given, criterion)
                optimizer.step()
                optimizer.zero_grad()
        assert result.loss.device == CUDA, f"the loss is on {result.loss.device}"
    return recorder.counts


def _boost(
    model: nn.Module, config: HybridParallelConfig, grid: meshes.HybridMesh, mode: FakeTensorMode
) -> tuple[HybridParallelModel, HybridParallelOptimizer]:
    """Do what `boost` does with a model on the meta device; the shards get memory on the fake device."""
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names, groups = names_of_parameters(model), [list(model.parameters())]
    origin = WholeModel.of(model)
    shared = shard_model(model, config, grid)
    model.train()
    with mode:
        give_memory(model, CUDA)
        built = wrap_model(model, config, grid, 0, origin, shared)
        optimizer = build_optimizer(optim, groups, names, built, config, grid)
    built.model.batches_seen, built.model.checked_full_batch = _LARGE, True
    return built.model, optimizer


@contextmanager
def stand_ins(headers: list[p2p.Specs]) -> Iterator[None]:
    """Answer what a rank reads from the host's memory, which fake tensors do not have."""
    received, to_header = iter(tuple(headers)), p2p.to_header
    headers.clear()

    def keep(specs: p2p.Specs) -> Tensor:
        headers.append(specs)
        return to_header(specs)

    patches: dict[Any, dict[str, Any]] = {
        meshes: {"pipelines_of": _on_host(meshes.pipelines_of)},
        p2p: {"to_header": keep, "from_header": lambda _: next(received)},
        # Agreement between ranks is on the host.
        GradientReducer: {"_agree_on_used": _on_host(GradientReducer._agree_on_used)},
        boosted_model: {"check_tied": _on_host(boosted_model.check_tied)},
        TokenDispatcher: {"_most": _on_host(TokenDispatcher._most)},
        step_batch: {
            "agreed_microbatches": _on_host(step_batch.agreed_microbatches),
            "is_known_to_all": lambda is_known, group: is_known,
        },
        CriterionStepLoss: {"_rows_of_all": lambda loss: [sum(loss.rows), 0]},
        FakeTensor: {"data_ptr": _address},
        # Tensors of numbers, and indices in lists, are made on the host and then copied, which is counted.
        FakeTensorMode: {"avoid_device_init": True},
        # transformers reads the values of masks, unless it takes the pass for one that is compiled.
        import_utils: {"is_fake_tensor": lambda _: False},
        torch.cuda: {
            "get_device_capability": lambda *_: (9, 0),
            "is_available": lambda: True,
            "Stream": _Stream,
            "current_stream": _Stream,
            "stream": lambda _: nullcontext(),
        },
    }
    with ExitStack() as stack:
        for owner, replacements in patches.items():
            for name, value in replacements.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


class _Stream:
    """A stream that only says where the host waits for it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def synchronize(self) -> None:
        record_wait("synchronize")


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` on real tensors."""

    def run(*args: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args)

    return run


def _address(tensor: FakeTensor) -> int:
    """An address that differs between storages, and between places in one."""
    return (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset() * tensor.element_size()
