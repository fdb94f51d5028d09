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
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.integrations.accelerate import Accelerator
from booster.integrations.fused_head import WithoutAdapters
from booster.integrations.meter_callback import MeterCallback
from booster.integrations.prepared_loader import PreparedLoader
from booster.integrations.trainer_arguments import check_arguments, check_datasets, check_job
from booster.launch import launch_from_torch
from booster.plugin import Plugin
from booster.wrappers import ModelWrapper

_STATE = "booster"  # folder of the training state in a checkpoint of Trainer


@functools.cache
def boosted(trainer_class: type) -> type:
    """Return `trainer_class` for boosted models: its `__init__` takes `plugin=`, the parallel training strategy.

    Args:
        trainer_class: transformers' `Trainer` or a class that derives from it, such as `Seq2SeqTrainer`, TRL's
            `SFTTrainer`, or one of your own.

    Raises:
        ConfigurationError: if it does not derive from `Trainer`.
    """
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ConfigurationError(
            f"boosted() got {trainer_class!r}, which does not derive from transformers.Trainer; give the class, as in "
            "boosted(Trainer)(model=..., plugin=...)"
        )
    return type(f"Boosted{trainer_class.__name__}", (BoostedTrainer, trainer_class), {"__doc__": trainer_class.__doc__})


class BoostedTrainer:
    """Mixin that makes a Trainer train boosted models; see `boosted`.

    Args:
        plugin: the parallel training strategy.
        args, kwargs: arguments of the Trainer class.

    Raises:
        ConfigurationError: if `plugin` is missing, or an argument of the Trainer cannot hold under the layout.
    """

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        if plugin is None:
            raise ConfigurationError(
                f"{type(self).__name__} got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
            )
        launch_from_torch(seed=None)
        self.plugin, self._sharing_a_loss, self._computes_loss = plugin, 1, False
        super().__init__(*args, **kwargs)
        if self.label_smoother is not None and self.accelerator.num_processes > 1:
            self.label_smoother = functools.partial(self._smooth_labels, self.label_smoother)
        check_datasets(self)

    # ----- the accelerator -----

    def create_accelerator_and_postprocess(self) -> None:
        """Replace accelerate's Accelerator by the one that boosts."""
        check_job(self.args)
        check_arguments(self.args, self.plugin)
        self.args._n_gpu = min(self.args.n_gpu, 1)
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(plugin=self.plugin, **self._accelerator_options)
        # The same method of the accelerator as Trainer has taken, with the same options.
        gather, options = self.accelerator.gather_for_metrics, getattr(self.gather_function, "keywords", {})
        self.gather_function = functools.partial(gather, **options)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options = super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}
        options.pop("dynamo_plugin", None)
        self._accelerator_options = {name: value for name, value in options.items() if value is not None}
        return options

    # ----- the model -----

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Boost the model together with its optimizer, also if it is evaluated before it is trained."""
        if isinstance(model, ModelWrapper):
            return model
        if self.optimizer is None and self.train_dataset is not None:
            self.create_optimizer()
        has_adapters = hasattr(model, "disable_adapter")
        if self.optimizer is None:
            self.model = self.accelerator.prepare(model)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.model.register_forward_hook(self._note_shared_loss, prepend=True)
        if has_adapters and getattr(self, "ref_model", self.model) is None:
            self.ref_model = WithoutAdapters(self.model)
        for callback in self._meters():
            callback.attach(self.plugin, self.model)
        self.model_wrapped = self.model
        self._mixed_mesh_grads = False  # Trainer would look for DTensors among the gradients
        return self.model

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as the Trainer class does; its mean over replicas is that over all samples, or items."""
        rows = find_batch_size(inputs)
        if num_items_in_batch is None and not self.model.training and self.accelerator.num_processes > 1:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        self._computes_loss, self._is_weighted = True, num_items_in_batch is not None
        try:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        finally:
            self._computes_loss, self._sharing_a_loss = False, 1
        if self._is_weighted or self.accelerator.num_processes == 1:
            return result
        loss, *outputs = result if return_outputs else (result,)
        loss = self._weighted(loss, rows)
        return (loss, *outputs) if return_outputs else loss

    def _smooth_labels(
        self, smoother: Any, outputs: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the smoothed loss of this replica's labels, whose mean over replicas is that over all labels."""
        if num_items_in_batch is not None:
            return smoother(outputs, labels, shift_labels, num_items_in_batch=num_items_in_batch)
        self._is_weighted = True
        counted = labels[..., 1:] if shift_labels else labels
        items = self.accelerator.reduce(counted.ne(smoother.ignore_index).sum())
        return smoother(outputs, labels, shift_labels, num_items_in_batch=items) * self.accelerator.num_processes

    def _weighted(self, loss: Tensor, rows: int | None) -> Tensor:
        """Weight a mean over this replica's samples by its share of the samples: the last batch may be short."""
        if rows is None:
            return loss
        total = int(self.accelerator.reduce(torch.tensor(rows)))
        weight = rows * self.accelerator.num_processes / max(total, 1)
        # The mean over no samples is nan.
        return loss * weight if rows else loss.nan_to_num(0.0) * 0.0

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Evaluate a batch; its loss is that of all replicas."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return None if loss is None else self.accelerator.reduce(loss, "mean"), logits, labels

    def _note_shared_loss(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Note whether the model computed the loss: it is then the mean over all replicas, the same on each."""
        if self._computes_loss and isinstance(outputs, Mapping) and "loss" in outputs:
            self._sharing_a_loss, self._is_weighted = self.accelerator.num_processes, True

    def get_tp_size(self) -> int:
        """Return the number of ranks that compute the same loss: Trainer multiplies a share of it by the others."""
        return self._sharing_a_loss

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

    # ----- batches that a resumed epoch has seen -----

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with _boosted_loaders_skip():
            return super()._inner_training_loop(*args, **kwargs)

    # ----- files -----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face directory, on all ranks together, that plain `from_pretrained` opens."""
        if not isinstance(self.model, ModelWrapper):  # not trained yet: every rank has the whole model
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.accelerator.save_model(self.model, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _training_state(self) -> dict[str, Any]:
        scheduler = self.lr_scheduler
        state = {"model": self.model, "optimizer": self.optimizer.optimizer, "lr_scheduler": scheduler}
        return {kind: value for kind, value in state.items() if value is not None}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.booster.save_checkpoint(Path(output_dir) / _STATE, **self._training_state())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _STATE
        if not folder.is_dir():
            raise ConfigurationError(
                f"{checkpoint} holds no training state of a boosted Trainer; start from its weights instead, as in "
                f"from_pretrained('{checkpoint}'), without resume_from_checkpoint"
            )
        self.accelerator.booster.load_checkpoint(folder, **self._training_state())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: the training state, which is loaded later, has the weights."""

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / _STATE).is_dir():
            self.accelerator.booster.load_checkpoint(best / _STATE, model=self.model)
        else:
            self.accelerator.booster.load_model(self.model, best)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the training state has the random states of all ranks."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the training state has the random states of all ranks."""

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the training state has the loss scale."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the training state has the loss scale."""


@contextmanager
def _boosted_loaders_skip() -> Iterator[None]:
    """Let boosted loaders skip batches by themselves in Trainer's loop, which rebuilds a loader from its parts."""
    from transformers import trainer

    rebuild = trainer.skip_first_batches

    def skip(loader: Any, num_batches: int = 0) -> Any:
        return loader.skip(num_batches) if isinstance(loader, PreparedLoader) else rebuild(loader, num_batches)

    trainer.skip_first_batches = skip
    try:
        yield
    finally:
        trainer.skip_first_batches = rebuild
