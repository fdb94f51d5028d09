"""accelerate's `Accelerator` on boosted objects: the same loop under tensor, pipeline and data parallelism.

    from booster.integrations.accelerate import Accelerator

    accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

What accelerate counts as a process is here a data-parallel replica.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.checkpointing import load_custom_state, save_custom_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, RandomSampler

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.fused_head import FusedHead
from booster.integrations.prepared_loader import PreparedLoader, seedable, with_sampler
from booster.integrations.replicas import Replicas, map_tensors
from booster.launch import launch_from_torch
from booster.plugin import Plugin
from booster.wrappers import ModelWrapper, OptimizerWrapper

_OTHER_ENGINES = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class Accelerator(accelerate.Accelerator):
    """accelerate's `Accelerator` whose `prepare` boosts.

    `num_processes` and `process_index` count data-parallel replicas; ranks of one replica have the same batches.
    `is_main_process` is true on one rank of all.

    Args:
        plugin: the parallel training strategy.
        options: accelerate's own options.

    Raises:
        ConfigurationError: if an option asks for another engine, or for another precision than the plugin's.
    """

    def __init__(self, plugin: Plugin | None = None, **options: Any) -> None:
        if plugin is None:
            raise ConfigurationError(
                "Accelerator() got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
            )
        launch_from_torch(seed=None)
        self.replicas = Replicas(plugin)
        self.booster = Booster(plugin=plugin)
        _check(options, getattr(plugin, "precision", "fp32"))
        cpu = options.pop("cpu", not torch.cuda.is_available())
        super().__init__(cpu=cpu, **{**options, "mixed_precision": "no"})

    # ----- where this rank is -----

    @property
    def num_processes(self) -> int:
        """Number of data-parallel replicas."""
        return self.replicas.size

    @property
    def process_index(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.replicas.rank

    @property
    def mixed_precision(self) -> str:
        """Precision of the plugin: "no", "fp16", "bf16" or "fp8"."""
        precision = getattr(self.booster.plugin, "precision", "fp32")
        return "no" if precision == "fp32" else precision

    # ----- prepare -----

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Boost models, optimizers and dataloaders, and wrap schedulers; other objects are returned as they are.

        An optimizer belongs to the model whose parameters it holds. What is prepared already is returned as it is.

        Raises:
            ConfigurationError: if an optimizer is prepared without its model, or the model does not allow the layout.
        """
        prepared = self._boost_models(objects)
        for each in objects:
            if id(each) in prepared:
                continue
            if isinstance(each, DataLoader):
                prepared[id(each)] = self.prepare_data_loader(each)
            elif isinstance(each, LRScheduler | ReduceLROnPlateau):
                prepared[id(each)] = self.prepare_scheduler(each)
            elif isinstance(each, OptimizerWrapper | AcceleratedOptimizer):
                prepared[id(each)] = self._register_optimizer(each)
            elif isinstance(each, torch.optim.Optimizer):
                raise ConfigurationError(
                    f"prepare() got a {type(each).__name__} without its model; give both in one call, as in "
                    "model, optimizer = accelerator.prepare(model, optimizer)"
                )
        results = tuple(prepared.get(id(each), each) for each in objects)
        return results[0] if len(results) == 1 else results

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Boost a model that is only evaluated; `prepare` boosts one together with its optimizer."""
        return self.prepare(model)

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> PreparedLoader:
        """Return a loader of this replica's share of each global batch."""
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        if self.use_seedable_sampler and isinstance(data_loader.sampler, RandomSampler):
            data_loader = with_sampler(data_loader, seedable(data_loader.sampler, self.dataloader_config.data_seed))
        loader = PreparedLoader(self.booster.boost(data_loader), self.gradient_state)
        self._dataloaders.append(loader)
        return loader

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """See `prepare`."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return a scheduler that steps when the optimizer does, once for each replica's batch as accelerate's does."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        own = [each for each in self._optimizers if each.optimizer is getattr(scheduler, "optimizer", None)]
        own = own or [each for each in self._optimizers if _inside(each) is getattr(scheduler, "optimizer", None)]
        wrapped = _ReplicaScheduler(scheduler, own or self._optimizers, self)
        self._schedulers.append(wrapped)
        return wrapped

    def _boost_models(self, objects: Iterable[Any]) -> dict[int, Any]:
        """Boost each model together with its optimizers; return a map from ids of given objects to prepared ones."""
        prepared: dict[int, Any] = {}
        optimizers = [
            each
            for each in objects
            if isinstance(each, torch.optim.Optimizer) and not isinstance(each, OptimizerWrapper | AcceleratedOptimizer)
        ]
        for model in objects:
            if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
                continue
            if isinstance(model, ModelWrapper):
                prepared[id(model)] = self._register_model(model)
                continue
            params = {id(param) for param in model.parameters()}
            own = [each for each in optimizers if id(each.param_groups[0]["params"][0]) in params]
            head = FusedHead.taken_from(model)
            boosted, *made = self.booster.boost(model, *own) if own else (self.booster.boost(model),)
            if head is not None:
                head.attach(boosted)
            prepared[id(model)] = self._register_model(boosted)
            prepared |= {id(given): self._register_optimizer(each) for given, each in zip(own, made, strict=True)}
        return prepared

    def _register_model(self, model: nn.Module) -> nn.Module:
        if all(model is not known for known in self._models):
            self._models.append(model)
        return model

    def _register_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = PreparedOptimizer(optimizer, device_placement=False)
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    # ----- the loop -----

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss`, divided by the number of accumulated batches, under any layout."""
        if not self._optimizers:
            raise ConfigurationError(
                "accelerator.backward() finds no optimizer; prepare it together with its model, as in model, optimizer "
                "= accelerator.prepare(model, optimizer)"
            )
        if kwargs:
            raise ConfigurationError(
                f"accelerator.backward() cannot take {sorted(kwargs)} under a layout; leave it out"
            )
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        self.booster.backward(loss, self._optimizers[0].optimizer)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with self.booster.no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients of a model so that their global norm is at most `max_norm`; return the norm before.

        Raises:
            ConfigurationError: if `parameters` are not those of a prepared model, or for another norm.
        """
        if norm_type != 2:
            raise ConfigurationError(f"norm_type={norm_type} is not counted over ranks; use norm_type=2")
        given = {id(param) for param in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for model in self._models:
            if given == {id(param) for param in model.parameters()}:
                return model.clip_grad_norm_(max_norm)
        raise ConfigurationError(
            "clip_grad_norm_ got other parameters than those of a prepared model, whose norm no rank knows alone; give "
            "model.parameters() of the model that prepare() returned"
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value], where each rank has whole gradients; see `param.grad`."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients that can be read are not scaled."""

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        """Return a context of the plugin's precision: the weights have it already."""
        return super().autocast(autocast_handler)

    # ----- values of all replicas -----

    def gather(self, tensor: Any) -> Any:
        """Return tensors of all replicas, joined along dim 0."""
        return self.replicas.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return values of all replicas: each sample once, in the order of the dataset."""
        if use_gather_object or not _has_tensors(input_data):
            return self.replicas.gather_objects(input_data)
        is_short = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0

        def gathered(tensor: Tensor) -> Tensor:
            # What has a row for each sample is as long as that already; accelerate cuts other rows too.
            rows = self.gradient_state.remainder if is_short and tensor.dim() else None
            found = self.replicas.gather(tensor)
            return found if rows is None else found[:rows]

        return map_tensors(gathered, input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return tensors added up or averaged over replicas."""
        return self.replicas.reduce(tensor, reduction, scale)

    # ----- files -----

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return this rank's shard of the model, of the user's own class; its weights are not whole."""
        return model.unwrap() if isinstance(model, ModelWrapper) else super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict of a model that each rank has whole.

        Raises:
            ConfigurationError: when it is saved, if this rank holds a part of the model.
        """
        return model.state_dict()

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write a Hugging Face directory from all ranks; see `Booster.save_model`."""
        self.booster.save_model(model, str(save_directory), **_save_options(args, kwargs))

    def save_state(self, output_dir: str | None = None, **options: Any) -> str:
        """Write the whole training state, which opens under any layout; return its folder.

        Raises:
            ConfigurationError: if several models or dataloaders that move on are prepared.
        """
        folder = self._state_folder(output_dir)
        self.booster.save_checkpoint(folder / "booster", **self._state(), step=self.step)
        if self.is_main_process:
            for index, each in enumerate(self._custom_objects):
                save_custom_state(each, str(folder), index)
        self.wait_for_everyone()
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | None = None, **options: Any) -> None:
        """Load what `save_state` wrote, under this layout or another.

        Raises:
            ConfigurationError: if there is no such state.
        """
        folder = Path(input_dir) if input_dir is not None else self._latest_state()
        if not (folder / "booster").is_dir():
            raise ConfigurationError(f"{folder} holds no state of save_state(); give the folder that it returned")
        self.step = self.booster.load_checkpoint(folder / "booster", **self._state())["step"]
        for index, each in enumerate(self._custom_objects):
            load_custom_state(each, str(folder), index)

    def _state(self) -> dict[str, Any]:
        """Return the prepared objects as `save_checkpoint` takes them."""
        kinds = {"model": self._models, "optimizer": self._optimizers, "lr_scheduler": self._schedulers}
        for kind, objects in kinds.items():
            if len(objects) > 1:
                raise ConfigurationError(
                    f"save_state() holds one {kind}, and {len(objects)} are prepared; save each with "
                    "accelerator.booster.save_checkpoint(folder, model=..., optimizer=...)"
                )
        # A loader of evaluation ends each epoch where it began: only one that is under way, or the first one, moves on.
        loader = next((each for each in self._dataloaders if each.is_under_way), next(iter(self._dataloaders), None))
        found = {kind: objects[0] for kind, objects in kinds.items() if objects}
        if "optimizer" in found:
            found["optimizer"] = found["optimizer"].optimizer
        if "lr_scheduler" in found:
            found["lr_scheduler"] = found["lr_scheduler"].scheduler
        return found | ({} if loader is None else {"dataloader": loader.loader})

    def _state_folder(self, output_dir: str | None) -> Path:
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            return Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if output_dir is None:
            raise ConfigurationError("save_state() got no folder; give one, or automatic_checkpoint_naming=True")
        return Path(output_dir)

    def _latest_state(self) -> Path:
        folder = Path(self.project_dir or ".") / "checkpoints"
        found = sorted(folder.glob("checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        if not found:
            raise ConfigurationError(f"load_state() finds no checkpoint in {folder}; give the folder of one")
        return found[-1]


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer, which steps only where gradients are complete, around a boosted one."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, because gradients were not finite."""
        return bool(getattr(self.optimizer, "step_was_skipped", False))


class _ReplicaScheduler(AcceleratedScheduler):
    """accelerate's wrapper of a scheduler, with a replica for a process."""

    def __init__(self, scheduler: Any, optimizers: list[Any], accelerator: Accelerator) -> None:
        # With `split_batches` one call is one step, whatever the number of processes.
        super().__init__(scheduler, optimizers, accelerator.step_scheduler_with_optimizer, split_batches=True)
        self.repeats = 1 if accelerator.split_batches else accelerator.num_processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each batch of a replica, as a schedule that counts a single process' batches expects."""
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self.repeats if self.step_with_optimizer else 1):
            if total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)


def _check(options: dict[str, Any], precision: str) -> None:
    for name in _OTHER_ENGINES:
        if options.get(name) is not None:
            raise ConfigurationError(f"{name} asks for another engine next to the plugin; leave it out")
    wanted = options.get("mixed_precision") or "no"
    if str(wanted) not in ("no", precision):
        raise ConfigurationError(
            f"mixed_precision={str(wanted)!r} is not the plugin's precision {precision!r}; use "
            f"HybridParallelPlugin(precision={str(wanted)!r})"
        )
    if (dynamo := options.pop("dynamo_backend", None)) not in (None, "no", "NO"):
        raise ConfigurationError(
            f"dynamo_backend={dynamo!r} cannot trace the communication of a boosted model; use "
            "HybridParallelPlugin(compile_layers=True)"
        )


def _inside(optimizer: AcceleratedOptimizer) -> Any:
    boosted = optimizer.optimizer
    return boosted.unwrap() if isinstance(boosted, OptimizerWrapper) else boosted


def _has_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        data = list(data.values())
    return isinstance(data, Tensor) or (isinstance(data, tuple | list) and any(map(_has_tensors, data)))


def _save_options(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    size = args[0] if args else kwargs.get("max_shard_size")
    return {} if size is None else {"size_per_shard": size}
