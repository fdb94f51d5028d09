"""transformers' Trainer, and what derives from it, on boosted models.

    from booster.integrations.transformers import boosted

    trainer = boosted(Trainer)(model=model, args=args, train_dataset=data, plugin=HybridParallelPlugin(tp_size=2))

The Trainer's own loop runs; a mixin before it in the order of classes replaces how models are wrapped, batches are
shared out, and checkpoints are written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.integrations import arguments
from booster.integrations.metrics import of_all_samples
from booster.integrations.prepared_loader import skipping
from booster.integrations.trainer_accelerator import CountedReplicas, TrainerAccelerator
from booster.integrations.trainer_checkpoints import MeterCallback, TrainerCheckpoints
from booster.integrations.trainer_loss import TrainerLoss
from booster.integrations.trl_trainers import trl_mixins
from booster.launch import launch_from_torch
from booster.plugin import Plugin
from booster.wrappers import ModelWrapper


@functools.cache
def boosted(trainer_class: type) -> type:
    """Return `trainer_class` for boosted models: its `__init__` takes `plugin=`, the parallel training strategy.

    Args:
        trainer_class: transformers' `Trainer` or a class that derives from it, such as `Seq2SeqTrainer`, TRL's
            `SFTTrainer`, or one of your own.

    Raises:
        ConfigurationError: if it does not derive from `Trainer`, is one of TRL's that holds under no layout, or
            transformers is too old.
    """
    import transformers
    from transformers import Trainer

    arguments.check_release("transformers", transformers.__version__)
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ConfigurationError(
            f"boosted() got {trainer_class!r}, which does not derive from transformers.Trainer; give the class, as in "
            "boosted(Trainer)(model=..., plugin=...)"
        )
    bases = (*trl_mixins(trainer_class), BoostedTrainer, trainer_class)
    return type(f"Boosted{trainer_class.__name__}", bases, {"__doc__": trainer_class.__doc__})


class BoostedTrainer(TrainerLoss, TrainerCheckpoints):
    """Mixin that makes a Trainer train boosted models by `plugin`, or refuses its arguments; see `boosted`."""

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        if plugin is None:
            raise ConfigurationError(
                f"{type(self).__name__} got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
            )
        launch_from_torch(seed=None)
        self.plugin = plugin
        super().__init__(*args, **kwargs)
        self._take_loss_functions()
        arguments.check_model(self.model, self.args, self.plugin)

    # ----- the accelerator -----

    def create_accelerator_and_postprocess(self) -> None:
        """Replace accelerate's Accelerator by the one that boosts."""
        arguments.check_job(self.args)
        arguments.check_arguments(self.args, self.plugin)
        self.args._n_gpu = min(self.args.n_gpu, 1)
        super().create_accelerator_and_postprocess()
        self.accelerator = TrainerAccelerator(plugin=self.plugin, **self._accelerator_options)
        self.args.distributed_state = CountedReplicas(lambda: self.accelerator.num_processes)
        # The same method of the accelerator as Trainer has taken, with the same options.
        gather, options = self.accelerator.gather_for_metrics, getattr(self.gather_function, "keywords", {})
        self.gather_function = functools.partial(gather, **options)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options = super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}
        options.pop("dynamo_plugin", None)
        options.pop("kwargs_handlers", None)  # of DistributedDataParallel, which wraps no boosted model
        self._accelerator_options = {name: value for name, value in options.items() if value is not None}
        return options

    # ----- the model -----

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a whole model where it is: boosting puts each rank's share in its place, also of one without values."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Boost the model together with its optimizer, also if it is evaluated before it is trained."""
        if isinstance(model, ModelWrapper):
            return model
        if self.optimizer is None and self.train_dataset is not None:
            self.create_optimizer()
        if self.optimizer is None:
            self.model = self.accelerator.prepare(model)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self._watch_losses_of(self.model)
        for callback in self._meters():
            callback.attach(self.plugin, self.model)
        self.model_wrapped = self.model
        self._mixed_mesh_grads = False  # Trainer would look for DTensors among the gradients
        return self.model

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's part of the operations of a batch: Trainer adds up those of all ranks."""
        if not hasattr(self.model.module, "num_parameters"):  # of a module that is no model of transformers
            return 0.0
        return super().floating_point_ops(inputs) * self.accelerator.num_processes / dist.get_world_size()

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of one optimizer step over all replicas."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def compute_loss_context_manager(self) -> ExitStack:
        """Run the forward pass under autocast if `bf16=True`, as Trainer does, and the plugin keeps fp32 weights."""
        stack = super().compute_loss_context_manager()
        if self.args.bf16 and self.accelerator.mixed_precision == "no":
            stack.enter_context(torch.autocast(self.args.device.type, torch.bfloat16))
        return stack

    # ----- the meter -----

    def _meters(self) -> list[MeterCallback]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, MeterCallback)]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch, which meters count."""
        for callback in self._meters():
            callback.meter.count(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values, with the figures of meters."""
        for callback in self._meters():
            callback.add_figures(logs)
        super().log(logs, *args, **kwargs)

    # ----- evaluation -----

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer class does: its metrics have the predictions of all replicas."""
        with of_all_samples():
            return super().evaluation_loop(*args, **kwargs)

    # ----- batches -----

    def get_train_dataloader(self) -> Any:
        """Return the loader of this replica's batches, whose position checkpoints hold."""
        self._train_loader = self.accelerator.prepare(super().get_train_dataloader())
        return self._train_loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer class does; a resumed epoch goes on after the batches that it has seen."""
        arguments.check_callbacks(self.callback_handler.callbacks, self.plugin)
        with _boosted_loaders_skip():
            return super().train(*args, **kwargs)


@contextmanager
def _boosted_loaders_skip() -> Iterator[None]:
    """Let boosted loaders skip batches by themselves in Trainer's loop, which rebuilds a loader from its parts."""
    from transformers import trainer

    rebuild = trainer.skip_first_batches
    trainer.skip_first_batches = skipping(rebuild)
    try:
        yield
    finally:
        trainer.skip_first_batches = rebuild
