"""HybridParallelStrategy: the strategy of a Trainer or of a Fabric, with the methods that each of them calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import DataParallelStrategy
from lightning.fabric.strategies import ParallelStrategy as FabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.strategies import ParallelStrategy as TrainerStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.lightning import checks, job
from booster.integrations.lightning.checks import attribute_of_boosted, boosted_inside
from booster.integrations.lightning.inner_model import boost_inside, boosted_in, without_model
from booster.plugin import Plugin
from booster.wrappers import ModelWrapper, OptimizerWrapper


class TrainerMethods(job.JobMethods, TrainerStrategy):
    """Strategy of a Trainer: it boosts the model inside the LightningModule together with its optimizers."""

    _checkpoint_path: Any = None
    _count: Any = None  # of the loss (sum, count) of the step under way
    _order: Any = None  # order of the samples before the sanity check

    # ----- set-up -----

    def connect(self, model: LightningModule) -> None:
        """Take the LightningModule, and keep Trainer from replacing samplers: loaders are shared out here."""
        checks.check_module(model)
        model.trainer._accelerator_connector.use_distributed_sampler = False
        super().connect(model)

    def setup_environment(self) -> None:
        """Prepare this rank's device; callbacks are known by now, and have not been set up."""
        if self.lightning_module is not None:
            checks.check_callbacks(self.lightning_module.trainer)
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
            checks.check_predictions(trainer, dataloader)
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
        checks.check_options_of_backward("backward()", args, kwargs)
        checks.check_loss(closure_loss, "self.model")
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
        return TrainerStrategy.optimizer_step(self, optimizer, closure, model, **kwargs)

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


class FabricMethods(job.JobMethods, FabricStrategy):
    """Strategy of a Fabric: `fabric.setup` boosts a model together with its optimizers."""

    _set_up: list[Any]  # boosted optimizers

    # ----- set-up -----

    def fabric_precision(self, given: Precision) -> Precision:
        """Return the precision of forward passes, the plugin's, or refuse another one."""
        plugin = self.booster.plugin
        checks.check_precision(given, plugin)
        if not checks.autocasts(given, plugin):
            return Precision()
        if plugin.mesh["pp"].size() > 1:
            raise ConfigurationError(
                f"precision={given.precision!r} converts all outputs, which a pipeline does not fetch; leave it out, "
                "and use HybridParallelPlugin(precision='bf16')"
            )
        return given

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Boost a model, or the one inside a LightningModule, together with its optimizers."""
        given = module
        module, made = boost_inside(given, optimizers, self.booster, self.shares)
        if module is not given:
            _show_instead(given, module)
        if self.booster.plugin.mesh["pp"].size() > 1:
            boosted_inside(module).register_forward_hook(lambda model, args, outputs: _unread(outputs))
        self._set_up += made
        return module, made, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Boost a model that is only evaluated."""
        return self.setup_module_and_optimizers(module, [])[0]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer by itself: it is boosted together with its model."""
        raise ConfigurationError(
            f"setup_optimizers() got a {type(optimizer).__name__} without its model; give both in one call, as in "
            "model, optimizer = fabric.setup(model, optimizer)"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: boosting puts each rank's share in its place."""

    # ----- steps -----

    def backward(
        self, tensor: Tensor | tuple[Tensor, Any], module: nn.Module | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Compute gradients of a loss, a mean or (sum, count), under any layout."""
        checks.check_options_of_backward("fabric.backward()", args, kwargs)
        if not self._set_up:
            raise ConfigurationError(
                "fabric.backward() finds no optimizer; set it up together with its model, as in model, optimizer = "
                "fabric.setup(model, optimizer)"
            )
        checks.check_loss(tensor, "the model that fabric.setup() returned")
        model = None if module is None else boosted_inside(module)
        own = None if model is None else next(iter(getattr(model, "optimizers", ())), None)
        self.booster.backward(tensor, own or boosted_in(self._set_up[0]))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure if there is one, with forward and backward pass, and step."""
        result = None if closure is None else closure()
        optimizer.step(**kwargs)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the norm over all ranks to `max_norm`; return the norm before (0-d), or raise if it is not finite."""
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}; use error_if_nonfinite=False to go on")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the gradients to ±`clip_val`."""
        optimizer.clip_grad_value_(clip_val)

    # ----- files -----

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a folder of that name, of one model, which opens under any layout; all ranks call it."""
        model, optimizers, rest = _parts(state)
        filtered = sorted(set(filter or ()) - set(rest))
        if filtered or storage_options is not None:
            given = f"filter for {filtered[0]!r}" if filtered else "storage_options"
            raise ConfigurationError(f"fabric.save() got a {given}, and a boosted model is written whole; leave it out")
        converted = self._convert_stateful_objects_in_state(rest, dict(filter or {}))
        self.checkpoint_folder.save(self.broadcast(str(path)), model, optimizers, converted)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote, under this layout or another, into the objects of `state`.

        Returns:
            What the checkpoint has besides.

        Raises:
            ConfigurationError: if it has another set of keys than `state`, and `strict`.
        """
        given = state if isinstance(state, dict) else {} if state is None else {"": state}
        model, optimizers, rest = _parts(given)
        saved = self.checkpoint_folder.rest(path, weights_only)
        self.checkpoint_folder.load(path, model, optimizers)
        missing = sorted(set(rest) - set(saved))
        if missing and strict:
            raise ConfigurationError(f"{path} has no {missing[0]!r}; it has {', '.join(sorted(saved))}")
        for name, value in rest.items():
            if name not in saved:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved.pop(name))
            else:
                given[name] = saved.pop(name)
        return saved


class NoSync(_BackwardSyncControl):
    """Fabric's `no_backward_sync` on boosted models."""

    def __init__(self, booster: Booster) -> None:
        self._booster = booster

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not communicate gradients."""
        return self._booster.no_sync(boosted_inside(module)) if enabled else nullcontext()


class UnreadOutputs:
    """Outputs of a pipeline that Fabric does not look through: it would fetch each one from the last stage.

    Args:
        outputs: outputs by name, which are fetched when they are read.
    """

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_outputs":
            raise AttributeError(name)
        return getattr(self._outputs, name)

    def __getitem__(self, key: Any) -> Any:
        return self._outputs[key]

    def __contains__(self, key: object) -> bool:
        return key in self._outputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def _show_instead(given: nn.Module, boosted: nn.Module) -> None:
    """Let Fabric's wrapper keep the boosted model where it keeps the module that it was given.

    It finds methods such as `generate`, state dicts and attributes there. The given module is sharded in place by now:
    its own methods would work on one rank's part.
    """

    def replaced(holder: nn.Module, name: str, module: nn.Module | None) -> nn.Module | None:
        if name != "_original_module" or module is not given:
            return None
        handle.remove()
        return boosted

    handle = register_module_module_registration_hook(replaced)


def _unread(outputs: Any) -> Any:
    return UnreadOutputs(outputs) if isinstance(outputs, Mapping) else outputs


def _parts(state: Mapping[str, Any]) -> tuple[nn.Module | None, list[Any], dict[str, Any]]:
    """Return the boosted model of a state, its boosted optimizers, and the rest."""
    models = {
        name: found for name, each in state.items() if isinstance(each, nn.Module) if (found := boosted_inside(each))
    }
    optimizers = {name: each for name, each in state.items() if isinstance(each, OptimizerWrapper)}
    if len(models) > 1:
        raise ConfigurationError(
            f"a checkpoint holds one boosted model, and {' and '.join(models)} are {len(models)}; save each by itself"
        )
    rest = {name: each for name, each in state.items() if name not in models and name not in optimizers}
    model: ModelWrapper | None = next(iter(models.values()), None)
    return model, list(optimizers.values()), rest


def _of_caller(name: str) -> Callable[..., Any]:
    """Make a method that is that of `TrainerMethods` or `FabricMethods`, whichever calls the strategy."""

    def method(self: HybridParallelStrategy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._methods, name)(self, *args, **kwargs)

    method.__name__ = name
    return method


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
            if not isinstance(given, job.BoostedPrecision):
                checks.check_precision(given, self.booster.plugin)
                given = job.BoostedPrecision(given, self.booster.plugin)
            self._methods = TrainerMethods
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

    # Methods that both call, with different arguments.
    backward, optimizer_step, process_dataloader, setup_environment, save_checkpoint, load_checkpoint = (
        _of_caller(name)
        for name in (
            *("backward", "optimizer_step", "process_dataloader"),
            *("setup_environment", "save_checkpoint", "load_checkpoint"),
        )
    )


# Fabric wants no `launch()` before `setup()` for these, which start no processes either.
DataParallelStrategy.register(HybridParallelStrategy)
