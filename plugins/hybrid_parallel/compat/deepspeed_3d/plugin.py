"""`ThreeDPlugin`: plugin for a `DeepSpeed3DParallelConfig`, which adapts models and batches to the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.data import DataLoader

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import TrainingObjects
from plugins.hybrid_parallel.compat.deepspeed_3d.batches import adapted, names_of_inputs
from plugins.hybrid_parallel.compat.deepspeed_3d.config import DeepSpeed3DParallelConfig
from plugins.hybrid_parallel.compat.deepspeed_3d.logits import helper_as_patch
from plugins.hybrid_parallel.compat.deepspeed_3d.patches import ForwardPatches, find_patched
from plugins.hybrid_parallel.compat.deepspeed_3d.tied import is_bare, share_config, with_tied_head
from plugins.hybrid_parallel.plugin import HybridParallelPlugin
from shardformer.compat.atorch.parallel_groups import ParallelGroups

_logger = get_logger(__name__)
_AXES = {"tensor": "tp_size", "data": "dp_size", "pipeline": "pp_size"}


class ThreeDPlugin(HybridParallelPlugin):
    """Plugin that `HybridParallelPlugin.from_3d_config` creates; see there.

    Attributes:
        three_d: the configuration.
        optimizer, lr_scheduler: the boosted optimizer and schedule built from `ds_config`; None if it describes none or
            `boost` was given one.
    """

    def __init__(
        self,
        config: DeepSpeed3DParallelConfig,
        parallel_config: tuple[Sequence[tuple[str, int]], Sequence[int] | None],
        **overrides: Any,
    ) -> None:
        if not isinstance(config, DeepSpeed3DParallelConfig):
            raise ConfigurationError(f"the configuration is a {type(config).__name__}; use DeepSpeed3DParallelConfig()")
        self.three_d, self.groups = config, _groups_of(parallel_config)
        for name, option in _AXES.items():
            if option in overrides:
                raise ConfigurationError(f"{option} conflicts with parallel_config; use the size of '{name}' there")
        options = config.options(self.groups.sizes)
        self._cuts_batch_itself = not {"num_microbatches", "microbatch_size"}.isdisjoint(overrides)
        if self._cuts_batch_itself:
            options.pop("num_microbatches", None)
        super().__init__(**{**options, **overrides})
        self._check_options()
        if config.deepspeed is not None:
            config.deepspeed.tell_what_is_left()
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self._names_of_inputs: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()

    def configure(self, objects: TrainingObjects) -> TrainingObjects:
        """Add the tied head and the patches to the model, build what `ds_config` describes, and boost."""
        self._check_loaders(objects.dataloaders)
        if objects.model is None:
            return super().configure(objects)
        names, patched = names_of_inputs(objects.model), find_patched(objects.model, self.three_d.custom_patcher or {})
        config = getattr(objects.model, "config", None)
        model = self._with_head(objects.model, patched)
        patches = ForwardPatches(model, patched)
        del patched  # otherwise it would keep modules alive that sharding replaces
        described = self._described(model, objects)
        try:
            patches.apply(model)
            boosted = super().configure(replace(described, model=model))
        except BaseException:
            patches.remove(model)
            if model is not objects.model:
                share_config(objects.model, model.config, config)
            raise
        patches.apply(boosted.model.unwrap())
        self._names_of_inputs[boosted.model] = names
        if described.optimizers and not objects.optimizers:
            self.optimizer = boosted.optimizers[0]
            boosted = replace(boosted, optimizers=[])
        if len(described.lr_schedulers) > len(objects.lr_schedulers):
            self.lr_scheduler = boosted.lr_schedulers[-1]
            boosted = replace(boosted, lr_schedulers=boosted.lr_schedulers[:-1])
        return boosted

    def _with_head(self, model: nn.Module, patched: dict[nn.Module, list]) -> nn.Module:
        helper = self.three_d.logit_helper
        if not self.three_d.tie_first:
            return model
        needs_head = is_bare(model)
        model = with_tied_head(model, helper)
        if needs_head and helper is not None:
            patched[model.get_output_embeddings()] = [helper_as_patch(helper)]
        return model

    def _described(self, model: nn.Module, objects: TrainingObjects) -> TrainingObjects:
        """Add the optimizer and the schedule that `ds_config` describes, unless `boost` was given one."""
        deepspeed, optimizers, schedulers = self.three_d.deepspeed, objects.optimizers, objects.lr_schedulers
        if deepspeed is None:
            return objects
        if deepspeed.optimizer is not None:
            if optimizers:
                _logger.info("ds_config: the block 'optimizer' is ignored: boost() was given an optimizer")
            else:
                optimizers = [deepspeed.optimizer.build(each for each in model.parameters() if each.requires_grad)]
        if deepspeed.scheduler is not None:
            if schedulers:
                _logger.info("ds_config: the block 'scheduler' is left, boost() was given a schedule")
            elif not optimizers:
                raise ConfigurationError(
                    "ds_config has a scheduler and no optimizer, and boost() was given none; use a block 'optimizer'"
                )
            else:
                schedulers = [deepspeed.scheduler.build(optimizers[0])]
        return replace(objects, optimizers=optimizers, lr_schedulers=schedulers)

    def _adapt(
        self, batch: Any, model: nn.Module, criterion: Callable[[Any, Any], Any] | None, needs_loss: bool
    ) -> tuple[Any, Callable[[Any, Any], Any] | None]:
        if self.three_d.batch_fn is not None:
            batch = self.three_d.batch_fn(batch)
        return adapted(batch, self._names_of_inputs[model], model, criterion, needs_loss)

    def _placement(self) -> list[list[list[int]]] | None:
        """Return the ranks as [dp][pp][tp]; None if the groups are in the plugin's own order."""
        tensor, data, pipeline = (self.groups.sizes.get(name, 1) for name in _AXES)
        ranks = [[[0] * tensor for _ in range(pipeline)] for _ in range(data)]
        for rank in self.groups.order:
            at = {name: 0 for name in _AXES} | self.groups.coordinates(rank)
            ranks[at["data"]][at["pipeline"]][at["tensor"]] = rank
        in_order = [
            [[(stage * data + replica) * tensor + shard for shard in range(tensor)] for stage in range(pipeline)]
            for replica in range(data)
        ]
        return None if ranks == in_order else ranks

    def _check_options(self) -> None:
        problems = []
        if self.config.parallel.device_mapping is not None:
            problems.append("device_mapping conflicts with parallel_config; use the order of ranks there")
        kernels = self.config.kernels
        if self.three_d.custom_patcher and (kernels.enable_jit_fused or kernels.enable_all_optimization):
            problems.append("custom_patcher patches layers that fused operators take apart; use enable_jit_fused=False")
        if self.three_d.logit_helper is not None and self.config.parallel.enable_sequence_parallelism:
            problems.append("logit_helper needs whole sequences; use enable_sequence_parallelism=False")
        if problems:
            raise ConfigurationError("; ".join(problems))

    def _check_loaders(self, loaders: Sequence[DataLoader]) -> None:
        """Check that at least one loader yields the batch of a whole step."""
        if self.three_d.deepspeed is None or self._cuts_batch_itself or not loaders:
            return
        micro, steps = self.three_d.deepspeed.batch_sizes(self.groups.sizes.get("data", 1))
        sizes = [loader.batch_size for loader in loaders]
        if micro is not None and None not in sizes and micro * steps not in sizes:
            raise ConfigurationError(
                f"batch_size={sizes[0]} of the loader is not train_micro_batch_size_per_gpu * "
                f"gradient_accumulation_steps = {micro} * {steps}, which one step takes; use batch_size={micro * steps}"
            )


def _groups_of(parallel_config: Any) -> ParallelGroups:
    """Parse `parallel_config` to process groups.

    Raises:
        ConfigurationError: it is malformed, or has other groups than tensor, data and pipeline with more than one rank.
    """
    try:
        axes, order = parallel_config
        axes = [(name, size) for name, size in axes]
        count = math.prod(size for _, size in axes)
        groups = ParallelGroups.of(axes, order, count)
    except (TypeError, ValueError) as error:
        example = '([("tensor", 2), ("data", 2), ("pipeline", 2)], None)'
        reason = str(error) if isinstance(error, ValueError) and "parallel group" in str(error) else ""
        reason = reason or (str(error) if "order of ranks" in str(error) else f"is none; use {example}")
        raise ConfigurationError(f"parallel_config={parallel_config!r}: {reason}") from None
    for name, size in groups.sizes.items():
        if name not in _AXES and size > 1:
            raise ConfigurationError(
                f"the parallel group '{name}' of size {size} is not a 3D-parallel axis; use tensor, data and pipeline"
            )
    return groups
