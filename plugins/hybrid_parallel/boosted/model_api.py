"""What scripts and libraries ask of a boosted model and do to it, apart from calls.

Each has the effect that it has on the plain model, or raises an error that says what to do instead.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.guards import GuardedModel, refuse_traced_call
from plugins.hybrid_parallel.zero.reducer import hooked_names
from shardformer.lazy import empty_copy
from shardformer.matmul.quantised import is_quantised
from shardformer.peft.kinds import FileNames, file_names
from shardformer.shard_spec import spec_of
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.utils.module_paths import tied_names


@dataclass(frozen=True)
class WholeModel:
    """Description of a model before it was sharded."""

    config: Any  # its configuration; None if it is not a transformers model
    names: frozenset[str]  # names of its parameters and persistent buffers
    aliases: Mapping[str, tuple[str, ...]]  # name -> the other names of the same (tied) parameter
    listed_as: Mapping[str, str]  # name of a tied parameter -> the name under which `named_parameters` lists it
    # peft adapter -> names of its tensors here -> names in its file
    adapter_names: Mapping[str, FileNames] = field(default_factory=dict)
    # (only trainable, without embeddings) -> number of parameters
    sizes: Mapping[tuple[bool, bool], int] = field(default_factory=dict)
    modules: nn.Module | str = "it was not boosted"  # the whole model without values; the reason where it has none

    @staticmethod
    def of(model: nn.Module) -> WholeModel:
        """Describe a model that is not sharded yet."""
        tied = tied_names(model)
        aliases = {name: tuple(other for other in names if other != name) for names in tied for name in names}
        listed_as = {name: names[0] for names in tied for name in names}
        config = copy.deepcopy(getattr(model, "config", None))
        names = frozenset(model.state_dict(keep_vars=True))
        modules = _modules_of(model)
        return WholeModel(config, names, aliases, listed_as, file_names(model), size_asked_of(model), modules)


def _modules_of(model: nn.Module) -> nn.Module | str:
    """Return the modules of a model without values, or why another layout could not be built from them."""
    if any(map(is_quantised, model.parameters())):
        return "its weights are quantised"
    if names := hooked_names(model):
        return f"{names[0]} has a hook on its gradient"
    try:
        return empty_copy(model)
    except Exception as error:  # a user's module may hold anything
        return f"its modules cannot be copied ({type(error).__name__}: {error})"


_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


class method_as_declared:  # noqa: N801 (a decorator)
    """Decorator of a method whose signature, on each object, is `declared(object)`.

    `inspect.signature(model.forward)` is how Trainer finds the columns of a dataset that a model reads.

    Args:
        declared: object -> signature to show, without `self`; None to show the method's own.
    """

    def __init__(self, declared: Callable[[Any], inspect.Signature | None]) -> None:
        self.declared = declared

    def __call__(self, method: Callable[..., Any]) -> method_as_declared:
        """Take the method."""
        self.method = method
        functools.update_wrapper(self, method)
        return self

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        """Return the method, bound to `instance`; it is made once and kept in the instance's attributes."""
        if instance is None:
            return self.method
        signature, method = self.declared(instance), self.method
        if signature is None:
            return MethodType(method, instance)

        @functools.wraps(method)
        def shown(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        shown.__signature__ = signature.replace(parameters=[_SELF, *signature.parameters.values()])
        return vars(instance).setdefault(method.__name__, MethodType(shown, instance))


class OnAnotherStage(nn.Module):
    """Stands for a module that another pipeline stage holds; it can be asked for, and every use of it is refused.

    Args:
        what: the module, as the model names it.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._problem = f"the {what} of this model lies on another pipeline stage; change or read it before boost()"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(self._problem)

    forward = register_forward_hook = register_forward_pre_hook = register_full_backward_hook = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._problem)


def size_asked_of(model: nn.Module) -> dict[tuple[bool, bool], int]:
    """Return what `model.num_parameters` says: (only trainable, without embeddings) -> number; empty if it cannot."""
    if not hasattr(model, "num_parameters"):
        return {}
    flags = (False, True)
    return {(trainable, inner): model.num_parameters(trainable, inner) for trainable in flags for inner in flags}


_OURS = ("booster.", "plugins.", "shardformer.")
_FINISHED = "_is_surface"  # attribute of a model whose own attributes are set
# What scripts read of DistributedDataParallel and set in it, without effect here.
_AS_DDP = {
    "find_unused_parameters": True,
    "static_graph": False,
    "require_forward_param_sync": True,
    "device_ids": None,
    "output_device": None,
    "dim": 0,
}
# What each DistributedDataParallel has besides, of buckets, buffers and copies: in each release of torch other things.
_PARTS_OF_DDP = frozenset(
    each.argval for each in dis.get_instructions(DistributedDataParallel.__init__) if each.opname == "STORE_ATTR"
)


class ModelApi(GuardedModel):
    """A boosted model as other code sees it: with attributes, names and sizes of the model that `boost` was given."""

    origin: WholeModel  # what is known of the model that `boost` was given

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        super().__init__(module, mesh)
        self._places = [
            (f"{path}.{name}" if path else name, inside._parameters, name, param)
            for path, inside in module.named_modules()
            for name, param in inside._parameters.items()
            if not is_quantised(param)  # frozen; peft's DoRA and `merge` put new ones in their places
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

    # ----- what scripts call on DistributedDataParallel -----

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether `booster.backward` sums gradients over replicas; without it they accumulate, until a pass with it."""
        return all(optimizer.reducer.synchronises for optimizer in self.optimizers)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.reducer.synchronises = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication in this context; see `Booster.no_sync`."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # also what the user's model has under such a name
        except AttributeError:
            if name in _AS_DDP:
                return _AS_DDP[name]
            if name in ("process_group", "device_type"):
                return self.mesh.group(DP_CP) if name == "process_group" else self.mesh.device.type
            if name in ("join", "_set_static_graph"):
                return nullcontext  # replicas have the same number of batches, of which the last may be empty on some
            if name == "register_comm_hook":
                return _refuse_comm_hook
            if name not in _PARTS_OF_DDP and (name.startswith("__") or not hasattr(DistributedDataParallel, name)):
                raise
        raise AttributeError(
            f"model.{name} is of DistributedDataParallel, which does not wrap a boosted model; leave it out, or ask "
            "whether isinstance(model, DistributedDataParallel) before"
        )

    # ----- hooks and weights -----

    def refuse_unseen_hooks(self) -> None:
        """Refuse the user's hooks on this model where it is not called."""
        registered = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        for hook in (hook for hooks in registered for hook in hooks.values()):
            if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith(_OURS):
                raise ConfigurationError(
                    "execute_pipeline does not call a hook that was registered on the boosted model; register it on "
                    "model.unwrap(), where it sees micro-batches, or use model(**batch) and booster.backward"
                )

    def check_weights(self) -> None:
        """Refuse weights that have taken the places of those that `boost` has shared out."""
        for name, held, key, param in self._places:
            if held.get(key) is not param:
                raise ConfigurationError(
                    f"{name} is another tensor than the one that boost() has shared out and that the optimizer trains "
                    "(functional_call, load_state_dict(assign=True) or an assignment has replaced it); change weights "
                    "in place, or use copy.deepcopy(model) for a model with other weights"
                )

    def watch_gradients(self, outputs: Any) -> None:
        """Let `torch.autograd.grad` find the plain gradients of inputs, and raise for parameters.

        No rank would get the whole gradient of a parameter. One that is a term of a loss (`create_graph=True`) is, as
        all that a script computes, of this rank's samples.
        """
        is_shared = any(self.mesh.size(axis) > 1 for axis in ("tp", DP_CP))
        if not (self.optimizers and is_shared and torch.is_grad_enabled()):
            return
        for name, value in outputs.items() if isinstance(outputs, Mapping) else (("", outputs),):
            if type(value) is Tensor and value.requires_grad:
                # The backward pass of the loss multiplies by the replicas, over which booster.backward takes the mean.
                value.register_hook(partial(self._by_hand, self.mesh.size(DP_CP) if name == "loss" else 1))

    def _by_hand(self, num_replicas: int, gradient: Tensor) -> Tensor | None:
        if any(optimizer.reducer.accepting for optimizer in self.optimizers):
            return None
        if torch.is_grad_enabled():
            return gradient if num_replicas == 1 else gradient / num_replicas
        params = (param for param in self.module.parameters() if param.requires_grad)
        if self.mesh.size("cp") > 1 or any(map(_is_asked_for, params)):
            raise ConfigurationError(
                "torch.autograd.grad finds the gradients of this rank's part of the model and of the batch alone; call "
                "booster.backward(loss, optimizer) and read optimizer.full_gradients()"
            )
        return gradient / num_replicas

    # ----- names and sizes of the whole model -----

    def take_whole_states(self) -> None:
        """Let the wrapped model take its part of whole state dicts, and of shards, by all names of tied weights."""
        origin = self.origin

        def take_own_part(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            own = module.state_dict(keep_vars=True)
            held_as = {origin.listed_as[name]: name for name in own if name in origin.listed_as}
            for given in [each for each in state if each.startswith(prefix)]:
                name = given.removeprefix(prefix)
                here = name if name in own else held_as.get(name, name)
                if here in own:
                    state[prefix + here] = _own_part(state.pop(given), own[here])
                elif name in origin.names:  # of another stage
                    del state[given]

        self.module.register_load_state_dict_pre_hook(take_own_part)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by the names that the whole model lists.

        A tied parameter that a stage holds as its head's weight is listed under the embedding's name, as in the
        unsharded model. Code that chooses parameters by name thus chooses the same ones on every stage.
        """
        listed_as = self.origin.listed_as if remove_duplicate else {}
        for name, param in super().named_parameters("", recurse, remove_duplicate):
            yield (f"{prefix}." if prefix else "") + listed_as.get(name, name), param

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter on this rank, as transformers has it."""
        return next((param.dtype for param in self.module.parameters() if param.is_floating_point()), torch.float32)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the whole model, as it was given to `boost`."""
        if not self.origin.sizes:
            return self.module.num_parameters(only_trainable, exclude_embeddings)
        return self.origin.sizes[only_trainable, exclude_embeddings]

    def get_input_embeddings(self) -> nn.Module:
        """Return this rank's shard of the input embeddings; on a stage without them, a module that refuses any use."""
        found = self.module.get_input_embeddings()
        return OnAnotherStage("input embedding") if isinstance(found, StagePlaceholder) else found

    def get_output_embeddings(self) -> nn.Module | None:
        """Return this rank's shard of the head; on a stage without it, a module that refuses any use."""
        found = self.module.get_output_embeddings()
        return OnAnotherStage("output embedding") if isinstance(found, StagePlaceholder) else found

    # ----- compilers and tracers -----

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_tracing()

    @staticmethod
    def refuse_tracer() -> None:
        """Refuse a call by `torch.jit.trace`, `torch.export`, `torch.onnx`, tensorboard's `add_graph` or a compiler."""
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            _refuse_tracing()
        refuse_traced_call()


def _is_asked_for(param: nn.Parameter) -> bool:
    """Return whether the backward pass under way is a `torch.autograd.grad` of this parameter."""
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch's answer for a leaf of autograd.grad
        return True
    return False


def _refuse_comm_hook(*args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigurationError(
        "model.register_comm_hook() would change how DistributedDataParallel sends gradients, and boost() sends them; "
        "leave it out, and use HybridParallelPlugin(precision='bf16') to send 16 bits"
    )


def _refuse_after_boost(what: str) -> NoReturn:
    raise ConfigurationError(
        f"{what} after boost() does not reach the parts of the model that the ranks hold; do it before boost()"
    )


def _refuse_tracing() -> NoReturn:
    raise ConfigurationError(
        "a boosted model has the part of one rank, and cannot be traced or exported; write it with "
        "booster.save_model(model, directory), and trace the plain model that from_pretrained opens"
    )


def _own_part(value: Any, held: Any) -> Any:
    """Return the shard of a whole tensor that is held here as `held`; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape == held.shape:
        return value
    spec = spec_of(held)
    return spec.shard(value) if tuple(value.shape) == spec.full_shape else value
