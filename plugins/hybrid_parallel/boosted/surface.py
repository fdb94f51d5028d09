"""What scripts and libraries do to a boosted model besides calling it: set attributes, trace it, replace its weights.

Each has the effect that it has on the plain model, or raises an error that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.guards import GuardedModel

_OURS = ("booster.", "plugins.", "shardformer.")
_FINISHED = "_is_surface"  # attribute of a model whose own attributes are set


class ModelSurface(GuardedModel):
    """A boosted model as other code sees it: with the attributes and the names of the wrapped one.

    Args:
        module: the sharded model.
        mesh: the grid of ranks.
    """

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        super().__init__(module, mesh)
        self._places = [
            (f"{path}.{name}" if path else name, inside._parameters, name, param)
            for path, inside in module.named_modules()
            for name, param in inside._parameters.items()
        ]

    # ----- attributes and modules -----

    def finish(self) -> None:
        """From now on, pass attributes that are set on to the wrapped model."""
        vars(self)[_FINISHED] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if _FINISHED not in vars(self):
            super().__setattr__(name, value)
        elif name == "forward" or isinstance(value, nn.Module | nn.Parameter):
            _refuse_after_boost(f"model.{name} = …")
        elif name not in vars(self) and not hasattr(type(self), name) and hasattr(self.module, name):
            setattr(self.module, name, value)  # generation_config, loss_function: the wrapped model reads them
        else:
            super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Refuse a new module: its weights would be in no optimizer, and in no file."""
        _refuse_after_boost("model.add_module()")

    register_module = add_module

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        """Refuse a new parameter: it would be in no optimizer, and in no file."""
        _refuse_after_boost("model.register_parameter()")

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> NoReturn:
        """Refuse a new buffer: it would be in no file."""
        _refuse_after_boost("model.register_buffer()")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this model, and the modules of the wrapped one by the names that they have there."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    # ----- hooks and weights -----

    def refuse_unseen_hooks(self) -> None:
        """Refuse the user's hooks on this model where it is not called.

        Raises:
            ConfigurationError: if there is one.
        """
        registered = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        for hook in (hook for hooks in registered for hook in hooks.values()):
            if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(_OURS):
                raise ConfigurationError(
                    "execute_pipeline does not call a hook that was registered on the boosted model; register it on "
                    "model.unwrap(), where it sees micro-batches, or use model(**batch) and booster.backward"
                )

    def check_weights(self) -> None:
        """Refuse weights that have taken the places of those that `boost` has shared out.

        Raises:
            ConfigurationError: if a parameter is another object.
        """
        for name, held, key, param in self._places:
            if held.get(key) is not param:
                raise ConfigurationError(
                    f"{name} is another tensor than the one that boost() has shared out and that the optimizer trains "
                    "(functional_call, load_state_dict(assign=True) or an assignment has replaced it); change weights "
                    "in place, or use copy.deepcopy(model) for a model with other weights"
                )

    def watch_gradients(self, outputs: Any) -> None:
        """Let `torch.autograd.grad` of outputs with respect to parameters raise: no rank would get the whole gradient.

        Gradients of inputs are not affected.
        """
        is_shared = any(self.mesh.size(axis) > 1 for axis in ("tp", "cp", "dp"))
        if not (self.optimizers and is_shared and torch.is_grad_enabled()):
            return
        for value in outputs.values() if isinstance(outputs, Mapping) else (outputs,):
            if type(value) is Tensor and value.requires_grad:
                value.register_hook(self._refuse_gradients_by_hand)

    def _refuse_gradients_by_hand(self, gradient: Tensor) -> None:
        if any(optimizer.reducer.accepting for optimizer in self.optimizers):
            return
        if any(param.requires_grad and _is_asked_for(param) for param in self.module.parameters()):
            raise ConfigurationError(
                "torch.autograd.grad finds the gradients of this rank's part of the model and of the batch alone; call "
                "booster.backward(loss, optimizer) and read optimizer.full_gradients()"
            )

    # ----- compilers and tracers -----

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_tracing()

    @staticmethod
    def refuse_tracer() -> None:
        """Refuse a call by `torch.jit.trace`, `torch.export`, `torch.onnx` or tensorboard's `add_graph`.

        Raises:
            ConfigurationError: if one of them traces this call.
        """
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            _refuse_tracing()


def _is_asked_for(param: nn.Parameter) -> bool:
    """Return whether the backward pass under way is a `torch.autograd.grad` of this parameter."""
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch's answer for a leaf of autograd.grad
        return True
    return False


def _refuse_after_boost(what: str) -> NoReturn:
    raise ConfigurationError(
        f"{what} after boost() does not reach the parts of the model that the ranks hold; do it before boost()"
    )


def _refuse_tracing() -> NoReturn:
    raise ConfigurationError(
        "a boosted model has the part of one rank, and cannot be traced or exported; write it with "
        "booster.save_model(model, directory), and trace the plain model that from_pretrained opens"
    )
