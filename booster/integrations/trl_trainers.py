"""TRL's trainers on boosted models: what they take from a whole batch, their reference model, and what cannot hold.

`boosted` puts `BoostedTRLTrainer` before the classes of TRL. What it relies on in TRL is listed, and tested, in
`zoo_tests/booster/integrations/test_upstream.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from booster.integrations.fused_head import AdapterReference
from booster.integrations.trainer_arguments import check_arguments, check_job
from booster.integrations.trl_arguments import check_options, check_options_of_model, check_trainer_class
from booster.launch import launch_from_torch
from booster.plugin import Plugin


def trl_mixins(trainer_class: type) -> tuple[type, ...]:
    """Return what `boosted` needs for a trainer of TRL; nothing for other trainers.

    Raises:
        ConfigurationError: if TRL is too old, or the trainer is none of those that hold under a layout.
    """
    names = _names_in_trl(trainer_class)
    if not names:
        return ()
    check_trainer_class(names)
    return (BoostedTRLTrainer,)


def _names_in_trl(trainer_class: type) -> list[str]:
    return [base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]


class BoostedTRLTrainer:
    """Mixin of a boosted trainer of TRL.

    Args:
        plugin: the parallel training strategy.
        args, kwargs: arguments of the trainer.

    Raises:
        ConfigurationError: if an option of the trainer cannot hold under the layout.
    """

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        if plugin is not None:
            launch_from_torch(seed=None)
            # TRL tokenizes before Trainer asks: what cannot hold is said before that.
            for given in (*args, *kwargs.values()):
                if hasattr(given, "per_device_train_batch_size"):
                    check_job(given)
                    check_arguments(given, plugin)
                    check_options(_names_in_trl(type(self)), given, plugin)
        self._num_stored = 0
        super().__init__(*args, plugin=plugin, **kwargs)
        check_options_of_model(self)

    # ----- data -----

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Prepare texts as one process does; KTO pairs the samples of a batch, which here is that of all replicas."""
        args = copy.copy(args)
        args.per_device_train_batch_size *= self.plugin.dp_size
        return super()._prepare_dataset(dataset, processing_class, args, *rest)

    # ----- the reference model -----

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Boost the model; without a reference model, its base or the first state of its adapter is the reference."""
        has_adapters = hasattr(model, "disable_adapter")
        wrapped = super()._wrap_model(model, *args, **kwargs)
        if has_adapters and getattr(self, "ref_model", self.model) is None:
            self.ref_model = AdapterReference(self.model)
        return wrapped

    def add_callback(self, callback: Any) -> None:
        """Add a callback; one that moves the reference towards the model has both whole meanwhile (ZeRO stage 3)."""
        if hasattr(callback, "sync_target_model"):
            callback.sync_target_model = partial(self._sync, callback.sync_target_model)
        super().add_callback(callback)

    def _sync(self, sync: Callable[..., None], model: nn.Module, target: nn.Module, alpha: float) -> None:
        with self.model.summon_full_params(writeback=False), target.summon_full_params():
            sync(model, target, alpha)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Compute log-probabilities of the reference by the boosted model, and store them where all ranks read them."""
        self._wrap_model(self.model)
        if not getattr(dataset, "cache_files", True):
            dataset = self._stored(dataset, name)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def _stored(self, dataset: Any, name: str) -> Any:
        """Return a dataset from memory as one in files: TRL stores log-probabilities in their folder."""
        from datasets import load_from_disk

        folder = Path(self.args.output_dir) / "reference_log_probs" / f"{name}-{self._num_stored}"
        self._num_stored += 1
        if self.accelerator.is_main_process:
            dataset.save_to_disk(folder)
        self.accelerator.wait_for_everyone()
        return load_from_disk(folder)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Score a batch by the reference in the precision of the training."""
        with self.compute_loss_context_manager():
            return super().compute_ref_log_probs(model, inputs)
