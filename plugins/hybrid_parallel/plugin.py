"""HybridParallelPlugin: composes tensor, sequence, pipeline and data parallelism. It holds no algorithm of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from booster import failure
from booster.errors import ConfigurationError, checks_arguments
from booster.plugin import CheckpointIO, PipelineResult, Plugin, TrainingObjects
from plugins.hybrid_parallel.config.options import HybridParallelConfig, is_planned, options_at
from plugins.hybrid_parallel.data.checks import check_batch_size
from plugins.hybrid_parallel.data.dataloader import Loading
from plugins.hybrid_parallel.data.microbatch import as_batch, next_batch
from plugins.hybrid_parallel.distributed.agreement import naming_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, announce_grid, build_mesh, in_blocks, ranks_of
from plugins.hybrid_parallel.features.diagnostics import synchrony_of
from plugins.hybrid_parallel.features.feature import checkpoints_of_job, options_of_job
from plugins.hybrid_parallel.guards import check_boosted, check_boosted_optimizer, check_criterion, refuse_backward
from plugins.hybrid_parallel.setup import input_checks
from shardformer.attention import log_once
from shardformer.distributed.process_groups import broadcast_json
from shardformer.utils.freed_memory import return_freed_memory

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.step.user_loop import LossBackward
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


class HybridParallelPlugin(Plugin):
    """Trains with tensor, sequence, pipeline and data parallelism, ZeRO and mixed precision.

    Example:
        ```python
        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, precision="bf16")
        ```

    Args:
        options: fields of the groups of `HybridParallelConfig`, as keyword arguments.

    Raises:
        ConfigurationError: if options do not exist, do not fit each other or do not fit the world size; the message
            has one sentence for each problem.
    """

    @partial(checks_arguments, example="HybridParallelPlugin(tp_size=2, pp_size=2)")
    def __init__(self, /, **options: Any) -> None:
        options, self._plans = options_of_job(options)
        self.config = HybridParallelConfig.from_options(**options)
        if dist.is_initialized():
            self.config.parallel.data_parallel_size(dist.get_world_size())
        self._models: list[weakref.ref[HybridParallelModel]] = []
        self._checked: Callable[[], Any] = lambda: None  # returns the criterion that was checked last
        # that of `boost`, whose layout check trains with it, or one of which was told that it does not
        self._criterion: Callable[[Any, Any], Any] | None = None
        self._tell_of_criterion: Callable[[], None] = lambda: None
        self._flops: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    @classmethod
    def from_config(cls, path_or_dict: str | Path | dict[str, Any], **overrides: Any) -> HybridParallelPlugin:
        """Create a plugin from a JSON file, a dict, or a text such as `tp=2,pp=2,zero_stage=2`.

        Args:
            path_or_dict: plugin options, or a description with `mode`, `sharding_size`, ...
            overrides: options that take precedence.

        Raises:
            ConfigurationError: if the file does not exist or is not a JSON object, or if its contents are refused.
        """
        return cls(**{**options_at(path_or_dict), **overrides})

    @classmethod
    def planned(cls, text: str, model: nn.Module, rows: int, length: int) -> HybridParallelPlugin:
        """Create a plugin as `text` says, which may leave the layout to the planner; see `Plugin.planned`."""
        if not is_planned(text):
            return cls.from_config(text)
        # Imported here: the planner is no part of training.
        from plugins.hybrid_parallel.planner.plan import options_for_model

        return cls.from_config(options_for_model(model, rows, length, _memory_of(text)))

    @classmethod
    def check_config(cls, path_or_dict: str | Path | dict[str, Any], num_ranks: int) -> str:
        """Check options for `from_config` before the ranks are started; see `Plugin.check_config`."""
        if is_planned(path_or_dict):
            _memory_of(path_or_dict)
            return path_or_dict
        config = HybridParallelConfig.from_options(**options_at(path_or_dict))
        dp_size = config.parallel.data_parallel_size(num_ranks)
        config.zero.num_shards(dp_size * config.parallel.cp_size)
        return config.layout(dp_size)

    @staticmethod
    def from_3d_config(
        config: Any,
        parallel_config: tuple[Sequence[tuple[str, int]], Sequence[int] | None],
        **overrides: Any,
    ) -> HybridParallelPlugin:
        """Create a plugin from ATorch's configuration of 3D parallelism.

        Args:
            config: a `DeepSpeed3DParallelConfig`: seed, sharding rules, patches, head, batches, and DeepSpeed's own
                configuration.
            parallel_config: `([("tensor", t), ("data", d), ("pipeline", p)], None)`, as for `create_parallel_group`.
            overrides: plugin options that take precedence.

        Raises:
            ConfigurationError: if these do not fit each other or the world size.
        """
        # Imported here, because it derives from this class.
        from plugins.hybrid_parallel.compat.deepspeed_3d.plugin import ThreeDPlugin

        return ThreeDPlugin(config, parallel_config, **overrides)

    # ----- where this rank is -----

    @cached_property
    def grid(self) -> HybridMesh:
        """The grid of ranks, with its process groups."""
        _check_joined()
        parallel = self.config.parallel
        shape = parallel.mesh_shape(dist.get_world_size())
        self.config.zero.num_shards(shape[1] * shape[2])
        input_checks.check_options(self.config.options())
        grid = build_mesh(*shape, self.config.checks_collectives, self._placement(), parallel.ep_size)
        announce_grid(grid.device_mesh.mesh)
        return grid

    def _placement(self) -> list[list[list[int]]] | None:
        """Return the ranks as [dp][pp][tp]; None if they are in default order."""
        mapping = self.config.parallel.device_mapping
        return None if mapping is None else in_blocks(ranks_of(mapping), dist.get_world_size())

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of torch with the axes `pp`, `dp`, `cp`, `tp`."""
        return self.grid.device_mesh

    @property
    def layout(self) -> str:
        """The sizes of the axes, for people."""
        return self.config.layout(self.dp_size)

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.config.parallel.tp_size

    @property
    def pp_size(self) -> int:
        """Number of pipeline-parallel ranks."""
        return self.config.parallel.pp_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.grid.size("dp")

    @property
    def dp_rank(self) -> int:
        """This rank's position on the data-parallel axis."""
        return self.grid.rank("dp")

    @property
    def tp_rank(self) -> int:
        """This rank's position on the tensor-parallel axis."""
        return self.grid.rank("tp")

    @property
    def stage_index(self) -> int:
        """This rank's position on the pipeline axis."""
        return self.grid.rank("pp")

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank runs the last stage of its pipeline, where criteria read outputs."""
        last = self.config.chunks_per_rank * self.pp_size - 1
        return self.stage_index == self.config.schedule.rank_of(last, self.pp_size)

    @property
    def precision(self) -> str:
        """Dtype of parameters and activations, as the option says: "fp32", "bf16", "fp16" or "fp8"."""
        return self.config.mixed_precision.precision

    def __getattr__(self, name: str) -> NoReturn:
        has = "plugin.mesh.get_group('tp') is a process group, plugin.tp_rank a place in it, plugin.tp_size its size"
        raise AttributeError(f"HybridParallelPlugin has no {name}; {has}", name=name, obj=self)

    # ----- the interface of Plugin -----

    def configure(self, objects: TrainingObjects) -> TrainingObjects:
        """Shard the model, re-point the optimizers at its shards and shard the data loaders."""
        _check_joined()
        for dataloader in objects.dataloaders:
            check_batch_size(dataloader, self.config.pipeline.least_batch_size)
        # Before the model: building it may draw random numbers, and errors in a loader are reported early.
        dataloaders = [self._loading.shard(dataloader) for dataloader in objects.dataloaders]
        model, optimizers = self._configure_model(objects)
        self._criterion = objects.criterion
        return_freed_memory()  # of the whole model, if it had values
        return replace(objects, model=model, optimizers=optimizers, dataloaders=dataloaders)

    def relayout(self, plugin: Plugin, objects: TrainingObjects) -> TrainingObjects:
        """Move the state of boosted objects to new ones under the layout of another plugin; see `booster.relayout`."""
        from plugins.hybrid_parallel.relayout import relayout

        model, made = objects.model, relayout(self.grid, plugin, objects)
        self._models = [each for each in self._models if each() is not model]
        return made

    @failure.guard("booster.backward")
    def backward(
        self, loss: Tensor | tuple[Tensor, Any], optimizer: torch.optim.Optimizer, by_rows: bool = True
    ) -> None:
        """Compute the gradients of `loss`; outside `no_sync`, also reduce them. See `Booster.backward`.

        All optimizers of the model receive their gradients, whichever one is given. So do the optimizers of other
        models of this plugin that contributed to the loss.
        """
        check_boosted_optimizer(optimizer)
        models = [model for reference in self._models if (model := reference()) is not None]
        self._backward.run(loss, optimizer, by_rows, models)

    @failure.guard("booster.execute_pipeline")
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> PipelineResult:
        """Run one batch through the pipeline."""
        from plugins.hybrid_parallel.step.passes import run_batch

        check_boosted({"model": model, "optimizer": optimizer})
        if optimizer is not None:
            if optimizer not in model.optimizers:
                raise ConfigurationError(
                    f"the {type(optimizer.unwrap()).__name__} was boosted with another model; give the optimizer that "
                    "boost() returned together with this one"
                )
        elif model.training and torch.is_grad_enabled():
            for each in model.optimizers:
                each.has_missed_pass = True
        if optimizer is not None and criterion is not None and criterion is not self._criterion:
            self._tell_of_criterion()
            self._criterion = criterion
        batch, criterion = self._adapt(next_batch(data_iter), model, criterion, return_loss or optimizer is not None)
        if optimizer is not None:
            self._loading.first_batches.compare(as_batch(batch))
        with naming_ranks():
            if optimizer is not None:
                for prepare in model.before_steps:
                    prepare()
            return run_batch(model, batch, criterion, optimizer is not None, return_loss, return_outputs)

    def _adapt(
        self, batch: Any, model: nn.Module, criterion: Callable[[Any, Any], Any] | None, needs_loss: bool
    ) -> tuple[Any, Callable[[Any, Any], Any] | None]:
        """Return the batch as a mapping and the criterion that takes it; subclasses may convert them."""
        if criterion is not self._checked() and criterion is not None:
            check_criterion(criterion)
            self._checked = weakref.ref(criterion) if type(criterion).__weakrefoffset__ else lambda: None
        return batch, criterion

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Accumulate gradients without reducing them (ZeRO stage 2: as shards); the first `backward` after it does."""
        check_boosted({"model": model, "optimizer": optimizer})
        with model.no_sync():
            yield

    def check_synchrony(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Compare the state that ranks must share; without `optimizer`, for all optimizers of the model."""
        check_boosted({"model": model, "optimizer": optimizer})
        synchrony_of(model).run(model.optimizers if optimizer is None else [optimizer])

    def verify(self, model_fn: Callable[[], nn.Module], batch: Mapping[str, Any], **options: Any) -> Any:
        """Run `booster.verify` with the options of this plugin."""
        # Imported here, because it trains with this class.
        from plugins.hybrid_parallel.verify.propose import verify_own_model

        return verify_own_model(model_fn, batch, self.config, **options)

    def model_flops(self, model: nn.Module, batch: Mapping[str, Any]) -> float | None:
        """Return the FLOPs of the whole model's forward pass of a batch, by the planner's count."""
        # Imported here: the planner is no part of training.
        from plugins.hybrid_parallel.planner.op_recorder import ModelFlops

        if model not in self._flops:
            self._flops[model] = ModelFlops(model)
        return self._flops[model].of(batch)

    def expert_load(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the tokens of each expert of the last step, by layer; nothing if they are not counted."""
        return {} if model.token_counts is None else model.expert_load()

    def peak_flops(self) -> float | None:
        """Return the FLOP/s of this rank's GPU by its vendor's specification; None for another device."""
        from plugins.hybrid_parallel.planner.op_recorder import peak_flops

        return peak_flops(self.config.mixed_precision.precision)

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """Create a loader over this rank's shard of `dataset`; `batch_size` is per data-parallel replica.

        `seed` is that of the shuffled order, which is else a plain loader's; further arguments are DataLoader's.
        """
        if seed is not None:
            kwargs["generator"] = torch.Generator().manual_seed(seed)
        try:
            loader = DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, **kwargs)
        except (TypeError, ValueError) as error:
            example = "plugin.prepare_dataloader(dataset, batch_size=8, shuffle=True)"
            raise ConfigurationError(f"DataLoader refuses its arguments ({error}); write {example}") from None
        check_batch_size(loader, self.config.pipeline.least_batch_size)
        return self._loading.shard(loader)

    @cached_property
    def checkpoint_io(self) -> CheckpointIO:
        """Saves and loads models, optimizers and checkpoints under any layout."""
        return checkpoints_of_job(self.grid, self._plans)

    # ----- steps of configure -----

    def _seed(self) -> int:
        """Return the seed of all random streams: the option, or the one that torch has on rank 0; all ranks call it."""
        seed = self.config.debugging.seed
        return seed if seed is not None else broadcast_json(torch.initial_seed() % 2**31)

    def _configure_model(
        self, objects: TrainingObjects
    ) -> tuple[HybridParallelModel | None, list[HybridParallelOptimizer]]:
        if objects.model is None:
            if objects.optimizers:
                raise ConfigurationError(
                    "boost() got an optimizer without its model; make it from the model before boost(), and give both "
                    "in one call: model, optimizer = booster.boost(model, optimizer)"
                )
            return None, []
        # Imported here: most processes that import the plugin train nothing.
        from plugins.hybrid_parallel.setup.optimizer import build_trained
        from plugins.hybrid_parallel.verify.before_boost import check_before_boost, tell_of_criterion

        self._tell_of_criterion = partial(tell_of_criterion, self.config)
        input_checks.check_optimizers_as_given(objects.optimizers)
        model = input_checks.model_as_given(objects.model)
        told = check_before_boost(replace(objects, model=model), self.config)
        built = build_trained(model, objects.optimizers, self.config, self.grid, self._seed)
        for line in told:
            log_once("check_layout:", line)
        built.model.files.io = partial(getattr, self, "checkpoint_io")
        if not objects.optimizers:
            refuse_backward(built.model)
        if objects.optimizers or not built.model.is_whole or built.model.gathers:
            input_checks.remember_as_boosted(model)
        self._models.append(weakref.ref(built.model))
        return built.model, list(built.model.optimizers)

    @cached_property
    def _backward(self) -> LossBackward:
        from plugins.hybrid_parallel.step.user_loop import LossBackward

        return LossBackward(self.grid, self.config, self._loading.first_batches)

    @cached_property
    def _loading(self) -> Loading:
        return Loading(self.grid, self.config.debugging.seed)


def _memory_of(text: str) -> str | None:
    """Return the memory in a layout `auto,memory=24GiB`, checked; None if there is none."""
    from plugins.hybrid_parallel.planner.plan import bytes_of

    further = text.partition(",")[2].strip()
    if not further:
        return None
    name, _, memory = further.partition("=")
    if name.strip() != "memory":
        raise ConfigurationError(f"the layout '{text}' has '{further}' where memory=24GiB, say, is due")
    bytes_of(memory)
    return memory


def _check_joined() -> None:
    if not dist.is_initialized():
        raise ConfigurationError("no process group is initialised; call launch_from_torch() first")
