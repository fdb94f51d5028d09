"""accelerate's `Accelerator` on boosted objects: the same loop under tensor, pipeline and data parallelism.

    from booster.integrations.accelerate import Accelerator

    accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

What accelerate counts as a process is here a data-parallel replica.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import ProfileKwargs
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, RandomSampler

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations import prepared_loader
from booster.integrations.accelerate_state import ReplicaValues, StateFolders
from booster.integrations.arguments import asked_of_launch, check_accelerator, check_release
from booster.integrations.fused_head import FusedHead
from booster.integrations.replicas import Replicas, join_metrics
from booster.launch import launch_from_torch
from booster.plugin import Plugin, load_plugin
from booster.wrappers import ModelWrapper, OptimizerWrapper
from shardformer.distributed.process_groups import world_group


class Accelerator(ReplicaValues, StateFolders, accelerate.Accelerator):
    """accelerate's `Accelerator` whose `prepare` boosts.

    `num_processes` and `process_index` count data-parallel replicas; ranks of one replica have the same batches.
    `is_main_process` is true on one rank of all, `is_last_process` too, and `wait_for_everyone` waits for all ranks.

    Args:
        plugin: the parallel training strategy, or the name of an installed one.
        options: accelerate's own options.

    Raises:
        ConfigurationError: if the plugin is missing, accelerate is too old, or an option cannot hold under a layout.
    """

    def __init__(self, plugin: Plugin | str | None = None, **options: Any) -> None:
        if plugin is None:
            raise ConfigurationError(
                "Accelerator() got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
            )
        check_release("accelerate", accelerate.__version__)
        plugin = load_plugin(plugin) if isinstance(plugin, str) else plugin
        on_gpu = torch.cuda.is_available()
        check_accelerator(options, getattr(plugin, "precision", "fp32"), on_gpu)
        launch_from_torch(seed=None, **asked_of_launch(options))
        self.replicas = Replicas(plugin)
        join_metrics(self.replicas)
        self.booster = Booster(plugin=plugin)
        with variables_of_this_rank():
            super().__init__(**options | {"cpu": not on_gpu, "mixed_precision": "no", "dynamo_backend": None})
        if self.state.num_processes != dist.get_world_size():
            raise ConfigurationError(
                f"accelerate counts {self.state.num_processes} process, and the process group {dist.get_world_size()} "
                "ranks; make the Accelerator before other objects of accelerate, or start the script by `booster run`"
            )

    # ----- where this rank is -----

    @property
    def num_processes(self) -> int:
        """Number of data-parallel replicas."""
        self.losses_by_rows = False
        return self.replicas.size

    @property
    def process_index(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.replicas.rank

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last one of all ranks."""
        return dist.get_rank() == dist.get_world_size() - 1

    @property
    def mixed_precision(self) -> str:
        """Precision of the plugin: "no", "fp16", "bf16" or "fp8"."""
        precision = getattr(self.booster.plugin, "precision", "fp32")
        return "no" if precision == "fp32" else precision

    @property
    def data_parallel_rank(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.process_index

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's position among those of its tensors."""
        return self.booster.plugin.mesh.get_local_rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's position among those of its sequences."""
        return self.booster.plugin.mesh.get_local_rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.booster.plugin.mesh.get_local_rank("pp")

    @property
    def data_parallel_shard_rank(self) -> NoReturn:
        """Refuse a position among FSDP's shards.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "accelerator.data_parallel_shard_rank is FSDP's, which is another engine; use data_parallel_rank"
        )

    # ----- prepare -----

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Boost models, optimizers and dataloaders, and wrap schedulers; other objects are returned as they are.

        An optimizer belongs to the model whose parameters it holds. What is prepared already is returned as it is.

        Raises:
            ConfigurationError: if an optimizer is prepared without its model, or the model does not allow the layout.
        """
        # Loaders come first: building a model may draw random numbers, which would change the order of samples.
        prepared: dict[int, Any] = {id(each): self.prepare_data_loader(each) for each in objects if _is_loader(each)}
        prepared |= self._boost_models(objects)
        for each in objects:
            if isinstance(each, LRScheduler | ReduceLROnPlateau):
                prepared[id(each)] = self.prepare_scheduler(each)
            elif isinstance(each, OptimizerWrapper | AcceleratedOptimizer):
                prepared[id(each)] = self._register_optimizer(each)
            elif isinstance(each, torch.optim.Optimizer) and id(each) not in prepared:
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

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> prepared_loader.PreparedLoader:
        """Return a loader of this replica's share of each global batch."""
        if isinstance(data_loader, prepared_loader.PreparedLoader):
            return data_loader
        if self.use_seedable_sampler and isinstance(data_loader.sampler, RandomSampler):
            data_loader = prepared_loader.rebuilt(
                data_loader, prepared_loader.seedable(data_loader.sampler, self.dataloader_config.data_seed)
            )
        if self.split_batches:
            data_loader = prepared_loader.split_by(data_loader, self.num_processes)
        loader = prepared_loader.PreparedLoader(self.booster.boost(data_loader), self.gradient_state)
        self._dataloaders.append(loader)
        return loader

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """See `prepare`."""
        return self.prepare(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return a scheduler that steps when the optimizer does, once for each replica's batch as accelerate's does."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        own = [each for each in self._optimizers if each.is_of(scheduler)] or self._optimizers
        repeats = 1 if self.split_batches else self.num_processes
        wrapped = prepared_loader.ReplicaScheduler(scheduler, own, self.step_scheduler_with_optimizer, repeats)
        self._schedulers.append(wrapped)
        return wrapped

    def _boost_models(self, objects: Iterable[Any]) -> dict[int, Any]:
        """Boost each model together with its optimizers; return a map from ids of given objects to prepared ones."""
        prepared: dict[int, Any] = {}
        ready = OptimizerWrapper | AcceleratedOptimizer
        optimizers = [
            each for each in objects if isinstance(each, torch.optim.Optimizer) and not isinstance(each, ready)
        ]
        for model in objects:
            if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
                continue
            if isinstance(model, ModelWrapper):
                prepared[id(model)] = self._register_model(model)
                continue
            params = {id(param) for param in model.parameters()}
            own = [each for each in optimizers if any(id(param) in params for param in _params_of(each))]
            head = FusedHead.taken_from(model)
            boosted, *made = self.booster.boost(model, *own) if own else (self.booster.boost(model),)
            if head is not None:
                head.attach(boosted)
            if self.replicas.size > 1:
                self._watch_losses_of(boosted)
            prepared[id(model)] = self._register_model(boosted)
            for given, each in zip(own, made, strict=True):
                prepared[id(given)] = self._register_optimizer(each, boosted)
        return prepared

    def _register_model(self, model: nn.Module) -> nn.Module:
        if all(model is not known for known in self._models):
            self._models.append(model)
        return model

    def _register_optimizer(self, optimizer: Any, model: nn.Module | None = None) -> AcceleratedOptimizer:
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = prepared_loader.PreparedOptimizer(optimizer, model)
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    # ----- the loop -----

    def _watch_losses_of(self, model: nn.Module) -> None:
        model.register_forward_hook(self._as_of_processes, with_kwargs=True)

    def _as_of_processes(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Return a model's outputs as a loop of several processes expects them.

        Such a loop multiplies a loss that is divided by `num_items_in_batch`, the items of all processes, by their
        number. So it is the mean over replicas of their parts here; the model returns their sum.
        """
        self.losses_by_rows = True
        if kwargs.get("num_items_in_batch") is None:
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0] / self.replicas.size, *outputs[1:])
        if outputs.get("loss") is not None:
            outputs["loss"] = outputs["loss"] / self.replicas.size
        return outputs

    def backward(self, loss: Tensor | tuple[Tensor, Any], **kwargs: Any) -> None:
        """Compute gradients of `loss`, divided by the number of accumulated batches, under any layout.

        A loss (sum, count) is divided by the counts of all replicas and accumulated batches instead; see
        `Booster.backward`.

        Raises:
            ConfigurationError: if no optimizer is prepared, or for options of `Tensor.backward`.
        """
        if not self._optimizers:
            raise ConfigurationError(
                "accelerator.backward() finds no optimizer; prepare it together with its model, as in model, optimizer "
                "= accelerator.prepare(model, optimizer)"
            )
        if kwargs:
            raise ConfigurationError(
                f"accelerator.backward() cannot take {sorted(kwargs)} under a layout; leave it out"
            )
        if self.gradient_accumulation_steps > 1 and isinstance(loss, Tensor):
            loss = loss / self.gradient_accumulation_steps
        self.booster.backward(loss, self._optimizers[0].optimizer, self.losses_by_rows)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of backward passes inside without communication; see `Booster.no_sync`.

        A pass after it completes them, also of outputs that were computed inside.
        """
        with self.booster.no_sync(model) if isinstance(model, ModelWrapper) else nullcontext():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Complete gradients in a backward pass inside, also within `no_sync`."""
        before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> NoReturn:
        """Refuse Lomo, which updates weights in the backward pass.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "accelerator.lomo_backward() updates weights before ranks have summed their gradients; use another "
            "optimizer, and accelerator.backward()"
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: all replicas have the same number of batches, of which the last may be empty on some."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients of a model so that their global norm is at most `max_norm`; return the norm before.

        Raises:
            ConfigurationError: if `parameters` are not those of a prepared model, or a norm cannot be.
        """
        return self._model_of(parameters, "clip_grad_norm_").clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of a model's gradients to [-clip_value, clip_value].

        Raises:
            ConfigurationError: if `parameters` are not those of a prepared model.
        """
        model = self._model_of(parameters, "clip_grad_value_")
        for optimizer in self._optimizers:
            if optimizer.model is model:
                optimizer.optimizer.clip_grad_value_(clip_value)

    def _model_of(self, parameters: Any, method: str) -> nn.Module:
        given = {id(param) for param in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for model in self._models:
            if given == {id(param) for param in model.parameters()}:
                return model
        raise ConfigurationError(
            f"{method} got other parameters than those of a prepared model, whose gradients no rank has alone; give "
            "model.parameters() of the model that prepare() returned"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients that can be read are not scaled."""

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader whose next iteration begins after so many batches; the order of samples stays the same."""
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile a block; each rank writes its own Chrome trace if `output_trace_dir` is set."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{dist.get_rank()}.json"))
            self.wait_for_everyone()

    # ----- files -----

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return this rank's shard of the model, of the user's own class; its weights are not whole."""
        return model.unwrap() if isinstance(model, ModelWrapper) else super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights of the whole model, in host memory, on all ranks; all ranks call it."""
        model = self._boosted(model)
        if not isinstance(model, ModelWrapper):
            return super().get_state_dict(model, unwrap)
        return self.booster.plugin.checkpoint_io.whole_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a Hugging Face directory, on all ranks together; see `Booster.save_model`.

        Raises:
            ConfigurationError: for `safe_serialization=False`, or if the directory cannot be written.
        """
        model = self._boosted(model)
        if not isinstance(model, ModelWrapper):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ConfigurationError(
                "save_model(safe_serialization=False) would write pickles; leave it out: the files are safetensors"
            )
        size = max_shard_size if isinstance(max_shard_size, str) else f"{max_shard_size / 1e3:f}KB"
        self.booster.save_model(model, str(save_directory), size_per_shard=size)

    def save(self, obj: Any, f: str | os.PathLike, safe_serialization: bool = False) -> None:
        """Write an object once, by the main process; a state dict of one rank's part as that of the whole model."""
        gather = getattr(obj, "gather", None) if isinstance(obj, dict) else None
        super().save(obj if gather is None else gather(), f, safe_serialization)

    def _boosted(self, model: nn.Module) -> nn.Module:
        """Return the prepared model that a model is, or that `unwrap_model` returned it of."""
        return next((each for each in self._models if isinstance(each, ModelWrapper) and each.module is model), model)

    def end_training(self) -> None:
        """End trackers, wait for saves in the background, and leave the process group."""
        self.booster.finish_saving()
        super().end_training()


def __getattr__(name: str) -> Any:
    """Return what else accelerate exports: scripts have one import line for all names."""
    return getattr(accelerate, name)


skip_first_batches = prepared_loader.skipping(accelerate.skip_first_batches)  # as `Accelerator.skip_first_batches`


def _is_loader(each: Any) -> bool:
    return isinstance(each, DataLoader | prepared_loader.PreparedLoader)


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


@contextmanager
def variables_of_this_rank() -> Iterator[None]:
    """Set `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` unless all are set; all ranks call it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    known = {name: os.environ.get(name) for name in names}
    missing = torch.tensor(int(None in known.values()))
    dist.all_reduce(missing, dist.ReduceOp.MAX, group=world_group())
    if not missing:
        yield
        return
    rank, machines = dist.get_rank(), _machines()
    here = [each for each, machine in enumerate(machines) if machine == machines[rank]]
    values = (rank, len(machines), here.index(rank), len(here))
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    try:
        yield
    finally:
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _machines() -> list[int]:
    """Return a number of the machine of each rank."""
    own = torch.tensor(zlib.crc32(socket.gethostname().encode()))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own, group=world_group())
    return [int(each) for each in found]
