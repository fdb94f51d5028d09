"""transformers' Trainer, and what derives from it, on boosted models.

    from booster.integrations.transformers import boosted

    trainer = boosted(Trainer)(model=model, args=args, train_dataset=data, plugin=HybridParallelPlugin(tp_size=2))

The Trainer's own loop runs; a mixin before it in the order of classes replaces how models are wrapped, batches are
shared out, and checkpoints are written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.data.rows import ItemCount, main_input_of, rows_of, unknown_rows
from booster.errors import ConfigurationError
from booster.integrations import arguments
from booster.integrations.prepared_loader import skipping
from booster.integrations.replicas import of_all_samples
from booster.integrations.trainer_accelerator import CountedReplicas, LossInProgress, Samples, TrainerAccelerator
from booster.integrations.trainer_checkpoints import MeterCallback, TrainerCheckpoints
from booster.integrations.trl_trainers import trl_mixins
from booster.launch import launch_from_torch
from booster.plugin import Plugin
from booster.wrappers import ModelWrapper
from shardformer.loss.terms import zero_of


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


class TrainerLoss:
    """Mixin of a Trainer: its loss is that of one process that has the samples of all replicas.

    Trainer averages the losses of processes. Here that mean must be the loss of the whole batch, although the shares of
    replicas have different numbers of samples and of labels: the model computes one loss of all replicas, the number of
    items is counted over all of them, and any other mean over samples is weighted by their number.
    """

    accelerator: TrainerAccelerator

    def _take_loss_functions(self) -> None:
        """Let the functions that the Trainer calls for a loss see the labels of all replicas."""
        if self.accelerator.num_processes == 1:
            return
        if self.label_smoother is not None:
            self.label_smoother = functools.partial(self._smooth_labels, self.label_smoother)
        if self.compute_loss_func is not None:
            self.compute_loss_func = functools.partial(self._call_loss_function, self.compute_loss_func)

    def _watch_losses_of(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(_with_plain_items, with_kwargs=True)
        model.register_forward_hook(self._note_shared_loss, prepend=True)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as the Trainer class does; its mean over replicas is that over all samples, or items."""
        replicas = self.accelerator.num_processes
        if replicas == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        rows = _rows_of(inputs, model)
        if num_items_in_batch is None and not self.model.training:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.as_subclass(ItemCount)
        with self.accelerator.computing_loss(LossInProgress(rows, num_items_in_batch)) as progress:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        loss, *outputs = result if return_outputs else (result,)
        self.accelerator.losses_by_rows = progress.is_shared and not progress.is_weighted
        if not (progress.is_shared or progress.is_weighted):
            if not getattr(num_items_in_batch, "was_read", False):
                loss = self._weighted(loss, rows, inputs)
            elif not progress.read_processes:  # a sum over this replica's items, divided by the number of all items
                loss = loss * replicas
        if progress.nothing is not None and not loss.requires_grad:
            # A loss may leave out what no sample is there for, but the other replicas wait for this backward pass.
            loss = loss + progress.nothing
        return (loss, *outputs) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Evaluate a batch; its loss is that of all replicas."""
        if self.accelerator.num_processes == 1:
            return super().prediction_step(model, inputs, *args, **kwargs)
        rows = _rows_of(inputs, model)
        with self.accelerator.computing_loss(LossInProgress(rows)) as progress:
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            loss = loss if progress.is_shared or progress.is_weighted else self._weighted(loss, rows, inputs)
            loss = self.accelerator.reduce(loss, "mean")
        return loss, logits, Samples.among(labels, rows)

    def _smooth_labels(
        self, smoother: Any, outputs: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the smoothed loss of this replica's labels, whose mean over replicas is that over all labels."""
        progress, replicas = self.accelerator.loss_in_progress, self.accelerator.replicas.size
        if progress is not None:
            progress.is_weighted = True
        if num_items_in_batch is not None:  # Trainer multiplies by the number of replicas
            return smoother(outputs, labels, shift_labels, num_items_in_batch=num_items_in_batch)
        counted = labels[..., 1:] if shift_labels else labels
        items = self.accelerator.reduce(counted.ne(smoother.ignore_index).sum())
        return smoother(outputs, labels, shift_labels, num_items_in_batch=items) * replicas

    def _call_loss_function(
        self, function: Any, outputs: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of the user's function, which Trainer multiplies by the number of replicas."""
        loss = function(outputs, labels, num_items_in_batch=num_items_in_batch, **kwargs)
        progress = self.accelerator.loss_in_progress
        if progress is None or num_items_in_batch is None:
            return loss
        progress.is_weighted = True
        if getattr(num_items_in_batch, "was_read", True):
            return loss
        return self._weighted(loss, progress.rows) / self.accelerator.replicas.size

    def _weighted(self, loss: Tensor, rows: int | None, inputs: Any = None) -> Tensor:
        """Weight a mean by this replica's share of the samples, which its batch must tell."""
        given = torch.tensor([rows or 0, rows is None], device=self.args.device)
        total, unknown = self.accelerator.reduce(given).tolist()
        if unknown:
            raise unknown_rows(inputs)
        weight = rows * self.accelerator.replicas.size / max(total, 1)
        # The mean over no samples is nan.
        return loss * weight if rows else loss.nan_to_num(0.0) * 0.0

    def _note_shared_loss(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Note whether the model computed the loss: it is then the mean over all replicas, the same on each."""
        progress = self.accelerator.loss_in_progress
        if progress is None:
            return
        if isinstance(outputs, Mapping) and "loss" in outputs:
            progress.is_shared = True
        elif progress.rows == 0 and torch.is_grad_enabled():
            progress.nothing = _nothing_of(outputs)


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


def _rows_of(inputs: Any, model: nn.Module) -> int | None:
    """Return the number of samples of a Trainer's inputs; None if they do not tell."""
    return rows_of(inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs)), main_input_of(model))


def _nothing_of(outputs: Any) -> Tensor | None:
    """Return a zero (0-d) whose backward pass goes through the whole model; None if no output is differentiable."""
    names = outputs.keys() if isinstance(outputs, Mapping) else [slice(None)]
    values = (outputs[name] for name in names)
    found = (value for value in values if isinstance(value, Tensor) and value.requires_grad)
    return next((zero_of(value) for value in found), None)


def _with_plain_items(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give the model the number of items as a plain tensor: that it reads it says nothing about the user's loss."""
    plain = {name: value.plain() if isinstance(value, ItemCount) else value for name, value in kwargs.items()}
    return args, plain
