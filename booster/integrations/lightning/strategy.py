"""HybridParallelStrategy: the strategy of a Trainer or of a Fabric."""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import DataParallelStrategy
from lightning.fabric.strategies import ParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy as TrainerStrategy
from torch import nn

from booster.integrations.lightning.fabric_methods import FabricMethods, NoSync
from booster.integrations.lightning.inner_model import attribute_of_boosted, boosted_inside, without_model
from booster.integrations.lightning.precision import BoostedPrecision, check_precision
from booster.integrations.lightning.trainer_methods import TrainerMethods
from booster.plugin import Plugin


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
