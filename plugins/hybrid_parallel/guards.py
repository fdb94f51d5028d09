"""What other code may do to a boosted model or optimizer; what would train or save other numbers is refused.

Other engines ask an object by name whether it is theirs, before they wrap it: that is where they are told.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from booster.errors import ConfigurationError
from booster.wrappers import ModelWrapper, OptimizerWrapper
from plugins.hybrid_parallel.distributed.mesh import EP, HybridMesh
from shardformer.shard_spec import spec_of

# The name that an engine asks for first -> the engine.
_ASKED_OF_MODELS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_is_accelerate_prepared": "Accelerator.prepare",
    "accepts_loss_kwargs": "Trainer",
}
# Methods of transformers' models that give them other modules or weights.
_BEFORE_BOOST = frozenset(
    {
        "add_adapter",
        "init_weights",
        "load_adapter",
        "resize_token_embeddings",
        "set_input_embeddings",
        "set_output_embeddings",
        "tie_weights",
    }
)
# Methods of transformers' models that write what a rank has -> what writes the whole.
_SAVED_BY = {
    "save_pretrained": "booster.save_model(model, directory)",
    "push_to_hub": "booster.save_model(model, directory), and upload the directory,",
}


class GuardedModel(ModelWrapper):
    """A boosted model as other code meets it.

    Where each rank has the whole model (data and context parallelism) it is saved like any other. Its parameters have
    the names of the model inside.

    Args:
        module: the sharded model.
        mesh: the grid of ranks.
    """

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        super().__init__(module)
        self.mesh = mesh
        self.optimizers: list[Any] = []
        if not self.is_whole:
            # Of the model inside: scripts for DistributedDataParallel call model.module.save_pretrained.
            for method in _SAVED_BY:
                if hasattr(module, method):
                    setattr(module, method, partial(_refuse_saving, method, self._cut_by()))

    # ----- engines around it -----

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED_OF_MODELS:
            _refuse_engine(_ASKED_OF_MODELS[name])
        if name == "_torchdynamo_orig_callable":
            self.compile()
        if name in _BEFORE_BOOST:
            return partial(_refuse_change, name)
        return super().__getattr__(name)

    def _replicate_for_data_parallel(self) -> NoReturn:
        _refuse_engine("DataParallel")

    def _marked_by_fsdp(self, value: bool) -> NoReturn:
        _refuse_engine("FSDP")

    _is_fsdp_managed_module = property(None, _marked_by_fsdp)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse `torch.compile`.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "torch.compile cannot trace what a model that boost() returned sends between ranks; leave it out, or use "
            "enable_jit_fused=True, which compiles the operators between products"
        )

    @staticmethod
    def refuse_outer_engine() -> None:
        """Refuse to run inside of another module that is wrapped.

        Raises:
            ConfigurationError: DistributedDataParallel runs this model.
        """
        if DistributedDataParallel._get_active_ddp_module() is not None:
            _refuse_engine("DistributedDataParallel")

    # ----- its weights -----

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the model's weights, each as a whole."""
        cut = (spec_of(param).full_shape != tuple(param.shape) for param in self.module.parameters())
        return self.mesh.size("pp") == 1 and not any(cut)

    def unwrap(self) -> nn.Module:
        self._wait_for_parameters()
        return super().unwrap()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self._wait_for_parameters()
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state dict of the model inside; where this rank has a part of it only, one that goes into no file."""
        self._wait_for_parameters()
        state = self.module.state_dict(*args, **kwargs)
        return state if self.is_whole else LocalState(state)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the model inside; optimizers take over what has changed in their next step.

        Raises:
            ConfigurationError: this rank has a part of the model only, and the state is not that of this part.
        """
        self._wait_for_parameters()
        try:
            return self.module.load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            if self.is_whole:
                raise
            raise ConfigurationError(
                f"model.load_state_dict() takes this rank's part of the model alone under {self._cut_by()}; for whole "
                "weights call booster.load_model(model, directory) on all ranks"
            ) from error

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """`save_pretrained` of the model inside.

        Raises:
            ConfigurationError: this rank has a part of it only.
        """
        self._wait_for_parameters()
        return self.module.save_pretrained(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """`push_to_hub` of the model inside.

        Raises:
            ConfigurationError: this rank has a part of it only.
        """
        self._wait_for_parameters()
        return self.module.push_to_hub(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            "a model that boost() returned holds process groups and can be neither pickled nor copied; in the place of "
            "torch.save(model) use booster.save_model(model, directory), or booster.save_checkpoint to continue later; "
            "an average of weights (EMA) can be a list of tensors, as docs/porting.md has it"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GuardedModel:
        """What `to`, `half`, `cuda` do; optimizers go on with the weights that they know."""
        weights = self.module.parameters() if self.optimizers else ()
        if any(fn(weight.data).data_ptr() != weight.data_ptr() for weight in weights):
            raise ConfigurationError(
                "boost() has put the model in its place and precision, and its optimizer works on these weights; "
                "convert the model before boost(), or use HybridParallelPlugin(precision=…)"
            )
        return super()._apply(fn, recurse)

    def _wait_for_parameters(self) -> None:
        for optimizer in self.optimizers:
            optimizer.wait_for_parameters()

    def _cut_by(self) -> str:
        sizes = {"tp_size": "tp", "pp_size": "pp", "ep_size": EP}
        return ", ".join(f"{name}={size}" for name, axis in sizes.items() if (size := self.mesh.size(axis)) > 1)


class LocalState(OrderedDict[str, Any]):
    """A state dict of one rank's pieces: it goes back into this model, and into no file."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalState:
        return LocalState((name, copy.deepcopy(value, memo)) for name, value in self.items())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            "model.state_dict() has this rank's part of the model alone; in the place of saving it call "
            "booster.save_model(model, directory) on all ranks"
        )


class GuardedOptimizer(OptimizerWrapper):
    """A boosted optimizer as other code meets it."""

    def __getattr__(self, name: str) -> Any:
        if name == "_step_supports_amp_scaling":
            raise ConfigurationError(
                "torch.amp.GradScaler cannot unscale the gradients of a boosted optimizer; leave it out and use "
                "HybridParallelPlugin(precision='fp16'), which scales the loss by itself"
            )
        if name == "_is_accelerate_prepared":
            _refuse_engine("Accelerator.prepare")
        return super().__getattr__(name)


def _refuse_engine(engine: str) -> NoReturn:
    raise ConfigurationError(
        f"{engine} cannot take what boost() returned, which shares out batches and averages gradients by itself; leave "
        f"{engine} out and train with booster.execute_pipeline, or with model(**batch) and booster.backward"
    )


def _refuse_saving(method: str, cut_by: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        f"model.{method}() would save this rank's part of the model alone under {cut_by}; call "
        f"{_SAVED_BY[method]} on all ranks"
    )


def _refuse_change(method: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        f"model.{method}() changes weights or modules that boost() has shared out; call it before boost()"
    )
