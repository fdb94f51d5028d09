"""The options of offloading: the memory of states, of shards of parameters, and of what layers save."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.groups import directory_of
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.features.feature import Feature, Parts
from plugins.hybrid_parallel.offload.activations import OPTION, OffloadedActivations, activation_store, layers_of
from plugins.hybrid_parallel.offload.stores import FileMemory, HostMemory, PagedFile, Store, open_unnamed
from plugins.hybrid_parallel.zero.bucket_layout import StateMemory, Storage
from plugins.hybrid_parallel.zero.granularity import Granularity, granularity_of
from plugins.hybrid_parallel.zero.stage3 import is_sharded

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel

# Optimizers of torch with two states for each value. The space for others is taken in their first step.
_TWO_STATES = frozenset(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta"))
_SLACK = 1.05  # padding of shards, and ends of pages


class Offload(Feature):
    """States, shards of parameters and activations that are elsewhere than on their device."""

    def __init__(self, config: HybridParallelConfig) -> None:
        super().__init__(config)
        self._store: Store | None = None

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse what could only fail later: directories, models without layers, optimizers that need their GPU."""
        place = self.config.offload.offload_activations
        check_layers(place, model)
        raise_on_all_ranks(lambda: check_places(optimizers, self.config, mesh.device.type))
        if place is not None:
            self._store = raise_on_all_ranks(lambda: activation_store(place, mesh.device))

    def sharded(self, parts: Parts) -> None:
        """Store states and shards of parameters elsewhere."""
        parts.storage = OffloadedStates(self.config, parts.mesh)

    def boosted(self, model: HybridParallelModel) -> None:
        """Move what layers save for the backward pass."""
        if self._store is None:
            return
        activations = OffloadedActivations(self._store, model.mesh.device)
        for stage in model.runtime.stages:
            with model.runtime.viewing(stage):
                activations.add(model.unwrap())
        model.runtime.register_microbatch_hook(lambda index: activations.begin_pass())
        model.around_passes.append(activations.around_pass)


def check_layers(place: str | Path | None, model: nn.Module) -> None:
    """Refuse a model without layers."""
    if place is not None and not any(layers_of(model)):
        raise ConfigurationError(
            f"{OPTION}={str(place)!r} moves what layers save, and {type(model).__name__} has none (in a ModuleList); "
            f"use {OPTION}=None"
        )


def check_places(optimizers: Sequence[torch.optim.Optimizer], config: HybridParallelConfig, device_type: str) -> None:
    """Refuse early directories that fail, and optimizers that cannot step on the host of a GPU."""
    offload, parallel = config.offload, config.parallel
    for option in ("offload_optimizer", "offload_parameters"):
        directory = directory_of(getattr(offload, option))
        if directory is not None:
            os.close(open_unnamed(directory, option))
    if offload.offload_optimizer is None or device_type != "cuda" or parallel.tp_size * parallel.ep_size == 1:
        return
    for optim in optimizers:
        if granularity_of(optim) is not Granularity.ELEMENT:
            raise ConfigurationError(
                f"{type(optim).__name__} reads whole parameters, whose parts tensor- or expert-parallel ranks exchange "
                "on their GPUs; use offload_optimizer=None, or AdamW"
            )


class OffloadedStates(Storage):
    """Where the options put states and shards of parameters."""

    def __init__(self, config: HybridParallelConfig, mesh: HybridMesh) -> None:
        self._config, self._mesh = config, mesh

    def of_states(self, optim: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> StateMemory:
        """Return the memory for an optimizer's states, or refuse it on all ranks, which must call this."""
        place = self._config.offload.offload_optimizer
        directory, on_gpu = directory_of(place), self._mesh.device.type == "cuda"
        if directory is None:
            return HostMemory() if place is not None and on_gpu else StateMemory()
        size = 0
        for param in params:
            updated = torch.promote_types(param.dtype, torch.float32)
            own = updated if self._config.mixed_precision.master_weights else param.dtype
            size += param.numel() * updated.itemsize  # its gradient
            size += param.numel() * own.itemsize * (own != param.dtype)
            size += param.numel() * own.itemsize * 2 * (type(optim).__name__ in _TWO_STATES)
        return self._open(directory, "offload_optimizer", size)

    def of_shards(self, params: Sequence[nn.Parameter]) -> StateMemory | None:
        """Return the memory of shards of parameters, None on their device; refused on all ranks, which call it."""
        place = self._config.offload.offload_parameters
        directory = directory_of(place)
        if directory is None:
            return HostMemory() if place is not None and self._mesh.device.type == "cuda" else None
        size = sum(param.numel() * param.element_size() for param in params if is_sharded(param))
        return self._open(directory, "offload_parameters", size)

    def _open(self, directory: Path, option: str, size: int) -> FileMemory:
        num_shards = self._config.zero.num_shards(self._mesh.size(DP_CP))

        def open_file() -> PagedFile:
            file = PagedFile(directory, option)
            file.reserve(int(size / num_shards * _SLACK))
            return file

        return FileMemory(raise_on_all_ranks(open_file))
