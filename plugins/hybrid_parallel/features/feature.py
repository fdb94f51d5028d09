"""Feature: the interface by which options attach to the core, and the list of them.

`boost` and the loops ask all features of a job at each point, in the order of the list. A further one is a file with a
class, and a line of `FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from booster.launch import debug_is_asked, elastic_place
from booster.plugin import CheckpointIO
from plugins.hybrid_parallel.config.groups import OffloadOptions
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import Storage
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from shardformer.distributed.random import SharedStream
from shardformer.matmul.quantised import quantised_name
from shardformer.peft import model_inside

if TYPE_CHECKING:  # they are made of features
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


@dataclass
class Parts:
    """What a boosted model and its optimizers are made of; a feature may replace each."""

    module: nn.Module  # this rank's shard of the model, on its device, in the dtypes of training
    mesh: HybridMesh
    seed: int  # of the random streams on this rank
    stream: SharedStream | None  # the random stream of replicated regions; None for torch's own
    units: Any = None  # cuts batches into passes of a constant number of samples; None for micro-batches
    # bucket, reducer: classes that hold and reduce gradients
    bucket: type[Bucket] = Bucket
    reducer: type[GradientReducer] = GradientReducer
    storage: Storage = Storage()  # where optimizer states and shards of parameters are


class Feature:
    """What an option adds to a job. Methods are in the order of their calls; each does nothing by default."""

    def __init__(self, config: HybridParallelConfig) -> None:
        self.config = config

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse what does not fit by a ConfigurationError, before anything is changed; all ranks call this."""

    def prepare(self, model: nn.Module) -> None:
        """Change the whole model, before it is sharded."""

    def sharded(self, parts: Parts) -> None:
        """Replace parts, or change this rank's shard, before the boosted model is made of them."""

    def boosted(self, model: HybridParallelModel) -> None:
        """Attach to the boosted model before its optimizers, for example to `model.around_passes`."""

    def finished(self, model: HybridParallelModel) -> None:
        """Attach to the boosted model after its optimizers, and after the hooks that gather its parameters."""

    def after_step(self, optimizer: HybridParallelOptimizer, model: HybridParallelModel) -> None:
        """Follow a step of an optimizer, which may have been skipped."""


def _is_packed(model: nn.Module) -> bool:
    """Return whether a quantiser of transformers, or peft's, has packed weights of a model."""
    inside = model_inside(model)
    return quantised_name(inside) is not None or getattr(inside, "hf_quantizer", None) is not None


_HERE = "plugins.hybrid_parallel"
# The class of a feature, and whether a job has it; the classes are imported by the jobs that do.
FEATURES: tuple[tuple[str, Callable[[HybridParallelConfig, nn.Module], Any]], ...] = (
    (f"{_HERE}.features.expert_load.CountedExperts", lambda config, model: config.policy.counts_experts),
    (f"{_HERE}.features.expert_load.SlotsOfExperts", lambda config, model: config.policy.expert_rank_capacity_factor),
    (f"{_HERE}.features.low_bits.QuantisedWeights", lambda config, model: _is_packed(model)),
    (f"{_HERE}.features.recomputation.Recomputation", lambda config, model: config.kernels.gradient_checkpointing),
    (f"{_HERE}.features.recomputation.TiledFeedForwards", lambda config, model: config.kernels.tiled_mlp),
    (f"{_HERE}.features.diagnostics.Debug", lambda config, model: config.debugging.debug),
    (f"{_HERE}.features.diagnostics.RecordedSchedule", lambda config, model: config.debugging.record_schedule),
    (f"{_HERE}.offload.places.Offload", lambda config, model: config.offload != OffloadOptions()),
    (f"{_HERE}.reproducible.feature.Reproducible", lambda config, model: config.debugging.reproducible),
    (f"{_HERE}.features.compilation.Compilation", lambda config, model: config.kernels.compile_layers),
    (f"{_HERE}.features.low_bits.Float8Products", lambda config, model: config.mixed_precision.precision == "fp8"),
)


def features_of(config: HybridParallelConfig, model: nn.Module) -> tuple[Feature, ...]:
    """Return the features of a job, in the order of `FEATURES`; some are due to what the `model` contains."""
    found = []
    for path, has in FEATURES:
        if has(config, model):
            module, _, name = path.rpartition(".")
            found.append(getattr(import_module(module), name)(config))
    return tuple(found)


def options_of_job(options: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the options of a plugin with what the job adds to them, and its plans for other numbers of ranks.

    An elastic job has a layout for the ranks that are there, and plans; another job has none.

    Raises:
        ConfigurationError: no layout fits the ranks; raised on all of them.
    """
    options, plans = dict(options), None
    if elastic_place() is not None:
        # Imported here: few jobs are elastic.
        from plugins.hybrid_parallel.elastic.layouts import for_present_ranks

        options, plans = for_present_ranks(options)
    return options | ({"debug": True} if debug_is_asked() else {}), plans


def tensor_group_of_job(model: nn.Module, config: HybridParallelConfig, mesh: HybridMesh) -> ProcessGroup:
    """Return the tensor-parallel group for a whole model, whose layers `reproducible` computes in blocks."""
    if not config.debugging.reproducible:
        return mesh.group("tp")
    from plugins.hybrid_parallel.reproducible.feature import tensor_group

    return tensor_group(model, config, mesh)


def checkpoints_of_job(mesh: HybridMesh, plans: Any) -> CheckpointIO:
    """Return what saves and loads checkpoints; in an elastic job, in memory too; `plans`: of `options_of_job`."""
    # Imported here, because torch's checkpoint modules take half as long to import as torch itself.
    from plugins.hybrid_parallel.checkpoint.io import HybridParallelCheckpointIO

    if plans is None:
        return HybridParallelCheckpointIO(mesh)
    from plugins.hybrid_parallel.elastic.layouts import ElasticCheckpointIO

    return ElasticCheckpointIO(mesh, plans)
