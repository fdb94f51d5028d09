"""HybridParallelStrategy: the strategy of a Trainer or of a Fabric, with the methods that a Trainer calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import DataParallelStrategy
from lightning.fabric.strategies import ParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy as TrainerStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from booster.errors import ConfigurationError
from booster.integrations.lightning.fabric_methods import FabricMethods, NoSync
from booster.integrations.lightning.inner_model import (
    attribute_of_boosted,
    boost_inside,
    boosted_in,
    boosted_inside,
    without_model,
)
from booster.integrations.lightning.job import (
    BoostedPrecision,
    JobMethods,
    check_callbacks,
    check_loss,
    check_module,
    check_options_of_backward,
    check_precision,
    check_predictions,
)
from booster.plugin import Plugin


class TrainerMethods(JobMethods, ParallelStrategy):
    """Strategy of a Trainer: it boosts the model inside the LightningModule together with its optimizers."""

    _checkpoint_path: Any = None
    _count: Any = None  # of the loss (sum, count) of the step under way
    _order: Any = None  # order of the samples before the sanity check

    # ----- set-up -----

    def connect(self, model: LightningModule) -> None:
        """Take the LightningModule, and keep Trainer from replacing samplers: loaders are shared out here."""
        check_module(model)
        model.trainer._accelerator_connector.use_distributed_sampler = False
        super().connect(model)

    def setup_environment(self) -> None:
        """Prepare this rank's device; callbacks are known by now, and have not been set up."""
        if self.lightning_module is not None:
            check_callbacks(self.lightning_module.trainer)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Boost the model with the optimizers that `configure_optimizers` makes for its whole weights."""
        module = self.lightning_module
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if boosted_inside(module) is None:
            if fits:
                self.setup_optimizers(trainer)
            _, optimizers = boost_inside(module, self.optimizers if fits else (), self.booster, self.shares)
            if fits:
                self.optimizers = optimizers
        elif fits:
            raise ConfigurationError(
                f"trainer.fit() got a {type(module).__name__} whose model is boosted already, and a model is boosted "
                "once, with its optimizers; fit a new one, with ckpt_path= to continue"
            )
        self.model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Call `configure_optimizers` of the LightningModule; raises ConfigurationError if it makes no optimizer."""
        optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        if any(isinstance(each, _MockOptimizer) for each in optimizers):
            raise ConfigurationError(
                "configure_optimizers() returned no optimizer, without which a boosted model has no gradients; return "
                "one, or call trainer.validate()"
            )
        self._optimizers = [boosted_in(each) for each in optimizers]

    def model_to_device(self) -> None:
        """Move what the LightningModule holds next to the model, which is in place."""
        with without_model(self.lightning_module):
            self.lightning_module.to(self.root_device)

    # ----- data -----

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this replica's share; a loader of the sanity check leaves the order of samples alone."""
        trainer = self.lightning_module.trainer
        if trainer.predicting:
            check_predictions(trainer, dataloader)
        loader = super().process_dataloader(dataloader)
        order = getattr(loader, "order", None)
        if trainer.sanity_checking and order is not None and self._order is None:
            self._order = (order, order.state_dict())
        return loader

    def on_validation_end(self) -> None:
        """Restore the order of samples after the sanity check, as Trainer restores the random states."""
        if self.lightning_module.trainer.sanity_checking and self._order is not None:
            order, state = self._order
            order.load_state_dict(state)

    # ----- steps -----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step, which returns a loss, (sum, count), or what Lightning takes besides."""
        with self.shares.step():
            loss = super().training_step(*args, **kwargs)
        loss, self._count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
        return loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step."""
        with self.shares.step():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step."""
        with self.shares.step():
            return super().test_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor | tuple[Tensor, Any], optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute gradients of a loss under any layout.

        Args:
            closure_loss: a mean; or (sum, count), which `training_step` or `manual_backward` gave.
            optimizer: the optimizer of the closure; None for all.

        Raises:
            ConfigurationError: if the loss does not depend on the boosted model, or an option cannot hold.
        """
        check_options_of_backward("backward()", args, kwargs)
        check_loss(closure_loss, "self.model")
        module, plugin = self.lightning_module, self.precision_plugin
        loss, *count = closure_loss if isinstance(closure_loss, tuple) else (closure_loss,)
        if self._count is not None and module.automatic_optimization:
            # Lightning has divided it by the number of accumulated batches, whose counts divide it here.
            loss, count = loss * module.trainer.accumulate_grad_batches, [self._count]
        loss = plugin.pre_backward(loss, module)
        self.booster.backward(
            (loss, *count) if count else loss, boosted_in(self.optimizers[0] if optimizer is None else optimizer)
        )
        return plugin.post_backward(loss, module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, with forward and backward pass, and step."""
        return ParallelStrategy.optimizer_step(self, optimizer, closure, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with self.booster.no_sync(boosted_inside(self.lightning_module)):
            yield

    # ----- files -----

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load checkpoints when the model is boosted."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Load optimizers here."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the LightningModule without the model, which `save_checkpoint` writes."""
        with without_model(self.lightning_module):
            return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the states of all ranks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder of that name, which opens under any layout; all ranks call it."""
        if storage_options is not None:
            raise ConfigurationError("storage_options says how to store a file, and a checkpoint is a folder; omit it")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        model = boosted_inside(self.lightning_module)
        self.checkpoint_folder.save(self.broadcast(str(filepath)), model, optimizers, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what Trainer saved; `load_model_state_dict` loads the rest of the folder."""
        self._checkpoint_path = checkpoint_path
        return self.checkpoint_folder.rest(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, in training with its optimizers (not weights alone), and the other state."""
        module = self.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        if fits and "optimizer_states" not in checkpoint:
            raise ConfigurationError(
                f"{self._checkpoint_path} has weights alone (save_weights_only=True), from which training cannot "
                "continue; give a whole checkpoint"
            )
        self.checkpoint_folder.load(self._checkpoint_path, boosted_inside(module), self.optimizers if fits else [])
        with without_model(module):
            module.load_state_dict(checkpoint["state_dict"], strict=strict)


class HybridParallelStrategy(TrainerMethods, FabricMethods):
    """Strategy that trains with tensor, pipeline and data parallelism.

    It is given to `lightning.Trainer` or `lightning.Fabric`. Of a LightningModule, the attribute that holds the weights
    to train is boosted; the rest of it stays as it is.

    Example:
        ```python
        strategy = HybridParallelStrategy(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
        trainer = lightning.Trainer(strategy=strategy, max_epochs=3, gradient_clip_val=1.0)
        ```

    Args:
        plugin: the parallel training strategy.

    Raises:
        ConfigurationError: if `plugin` is missing, or what Trainer or Fabric is asked for cannot hold under the layout.
    """

    def __init__(self, plugin: Plugin | None = None) -> None:
        self._methods: type[TrainerMethods] | type[FabricMethods] = TrainerMethods
        self._set_up = []
        TrainerStrategy.__init__(self)
        FabricStrategy.__init__(self)
        self._join(plugin)
        self._backward_sync_control = NoSync(self.booster)

    def save_model(self, directory: str, model: nn.Module | None = None, **options: Any) -> None:
        """Write the model as a Hugging Face directory, which plain `from_pretrained` opens; all ranks call it.

        Args:
            model: what `fabric.setup` returned; None for the model of a Trainer.
            options: see `Booster.save_model`.
        """
        self.booster.save_model(boosted_inside(self._module_of(model)), directory, **options)

    def whole_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the state dict of the whole model or LightningModule, in host memory, on all ranks; all ranks call it.

        Args:
            model: what `fabric.setup` returned; None for the LightningModule of a Trainer.
        """
        module = self._module_of(model)
        whole = self.booster.plugin.checkpoint_io.whole_state_dict(boosted_inside(module))
        if not isinstance(module, LightningModule):
            return whole
        prefix = f"{attribute_of_boosted(module)}."
        with without_model(module):
            return module.state_dict() | {prefix + name: each for name, each in whole.items()}

    def _module_of(self, model: nn.Module | None) -> nn.Module:
        """Return the boosted model, or the LightningModule around it."""
        return self.lightning_module if model is None else getattr(model, "_forward_module", model)  # Fabric's wrapper

    # ----- what Trainer and Fabric set first, each under its own name -----

    @property
    def precision_plugin(self) -> Any:
        """Precision of a Trainer."""
        return TrainerStrategy.precision_plugin.fget(self)

    @precision_plugin.setter
    def precision_plugin(self, given: Any) -> None:
        if given is not None:
            check_precision(given, self.booster.plugin)
            self._methods = TrainerMethods
            given = given if isinstance(given, BoostedPrecision) else BoostedPrecision(given, self.booster.plugin)
        self._precision_plugin = given

    @property
    def precision(self) -> Any:
        """Precision of a Fabric."""
        return FabricStrategy.precision.fget(self)

    @precision.setter
    def precision(self, given: Any) -> None:
        if given is not None:
            self._methods = FabricMethods
            given = self.fabric_precision(given)
        self._precision = given

    # ----- methods that both call, with different arguments -----

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients; see `TrainerMethods.backward` and `FabricMethods.backward`."""
        return self._methods.backward(self, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step; see `TrainerMethods.optimizer_step` and `FabricMethods.optimizer_step`."""
        return self._methods.optimizer_step(self, *args, **kwargs)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share out a loader; see `JobMethods.process_dataloader`."""
        return self._methods.process_dataloader(self, dataloader)

    def setup_environment(self) -> None:
        """Prepare this rank's device."""
        self._methods.setup_environment(self)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint; see `TrainerMethods.save_checkpoint` and `FabricMethods.save_checkpoint`."""
        self._methods.save_checkpoint(self, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; see `TrainerMethods.load_checkpoint` and `FabricMethods.load_checkpoint`."""
        return self._methods.load_checkpoint(self, *args, **kwargs)


# Fabric wants no `launch()` before `setup()` for these, which start no processes either.
DataParallelStrategy.register(HybridParallelStrategy)
