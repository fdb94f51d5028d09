"""ModuleWatch: checks the outputs of every module and the gradients that pass through it. Slow: for debug mode.

In the forward pass, it checks module outputs. In the backward pass, the origin is a module that received a finite
gradient and passed on a non-finite one. Each module therefore reads its inputs through its own views, whose gradients
come from this module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from booster.logging import get_logger
from plugins.hybrid_parallel.debug.nonfinite import BACKWARD, MODULE, Finding, describe, is_bad
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.zero.bucket_parameter import native_grad
from shardformer.utils.untraced import in_backward

_logger = get_logger(__name__)


@dataclass
class _Call:
    """One call of a module."""

    module: nn.Module
    title: str
    bad_inputs: list[str] = field(default_factory=list)
    was_given_finite: bool | None = None  # whether the gradient of its output was finite; None if none was seen


@dataclass
class _Sighting:
    """The first non-finite value in one direction of one micro-batch."""

    clock: int  # its time, as a number of calls; equal on ranks that share a model's tensors
    text: str  # description of the value
    is_origin: bool  # whether it did not come from a bad input


_Key = tuple[int, int]  # pass, micro-batch


class ModuleWatch:
    """Hooks on all modules and parameters of a model that record the first non-finite values.

    Args:
        model: the sharded model, on its device, with its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward: dict[_Key, _Sighting] = {}
        self._backward: dict[_Key, _Sighting] = {}
        self._suspects: set[str] = set()  # modules that returned nan or inf since the last step
        self._accepted: set[str] = set()  # modules that did so in a step that ended well, as masks do
        self._calls: list[_Call] = []
        self._key: _Key = (0, 0)
        self._clock = 0
        for name, module in model.named_modules():
            title = f"{name or 'the model'} ({type(module).__name__})"
            module.register_forward_pre_hook(partial(self._before, title), with_kwargs=True)
            module.register_forward_hook(self._after)
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._on_parameter, name))

    def begin_pass(self, number: int) -> None:
        """Begin a pass; `begin_microbatch` follows if it has several micro-batches."""
        self._key = (number, 0)
        self.begin_microbatch(0)

    def begin_microbatch(self, index: int) -> None:
        """Begin either direction of a micro-batch."""
        self._key, self._clock = (self._key[0], index), 0
        self._calls.clear()  # a stage leaves the model by an exception, so calls may remain

    def forget(self) -> None:
        """Forget what was seen, because a new step begins."""
        self._forward.clear()
        self._backward.clear()
        self._suspects.clear()

    def accept(self) -> None:
        """Accept the outputs of the step's modules as intended, because the step ended well."""
        self._accepted |= self._suspects
        self.forget()

    def findings(self, mesh: HybridMesh) -> Iterator[Finding]:
        """Yield what became non-finite first on this rank, in each direction of each micro-batch."""
        for kind, sightings, stage in (
            (MODULE, self._forward, mesh.rank("pp")),
            (BACKWARD, self._backward, -mesh.rank("pp")),
        ):
            for key, seen in sightings.items():
                order = (*key, mesh.rank("dp"), stage, seen.clock, int(not seen.is_origin), mesh.rank("tp"))
                yield Finding(kind, order, seen.text, mesh.place)

    # ----- forward -----

    def _before(self, title: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if in_backward():  # recomputation: already checked the first time
            return _mapped(args, _view), _mapped(kwargs, _view)
        call = _Call(module, title)
        self._calls.append(call)
        for name, tensor in _tensors((args, kwargs)):
            if is_bad(tensor):
                call.bad_inputs.append(name)
        if not torch.is_grad_enabled():
            return None
        own_view = partial(self._own_view, call)
        return _mapped(args, own_view), _mapped(kwargs, own_view)

    def _own_view(self, call: _Call, tensor: Tensor) -> Tensor:
        view = _view(tensor)
        if view is not tensor:
            view.register_hook(partial(self._on_input_gradient, call))
        return view

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if in_backward():
            return
        while self._calls and self._calls[-1].module is not module:
            self._calls.pop()
        if not self._calls:
            return
        call = self._calls.pop()
        self._clock += 1
        for _, tensor in _tensors(output):
            if tensor.requires_grad:
                call.was_given_finite = True  # until the hook says otherwise
                tensor.register_hook(partial(self._on_output_gradient, call))
            if is_bad(tensor):
                self._on_bad_output(call, tensor)

    def _on_bad_output(self, call: _Call, output: Tensor) -> None:
        self._suspects.add(call.title)
        if call.title in self._accepted or self._key in self._forward:
            return
        weights = [name for name, param in call.module.named_parameters(recurse=False) if is_bad(param)]
        came_from = f"bad input {', '.join(call.bad_inputs)}" if call.bad_inputs else "finite inputs"
        own = f" and a bad {', '.join(weights)}" if weights else ""
        text = (
            f"the output of {call.title} is the first in the forward pass of micro-batch {self._key[1]}, "
            f"with {describe(output)}, from {came_from}{own}"
        )
        self._forward[self._key] = _Sighting(self._clock, text, is_origin=bool(weights) or not call.bad_inputs)
        _logger.warning("not finite: %s", text)  # at once, because the step may not finish

    # ----- backward -----

    def _on_output_gradient(self, call: _Call, grad: Tensor) -> None:
        self._clock += 1
        if is_bad(grad):
            call.was_given_finite = False
            self._see(f"the gradient of the output of {call.title}", grad, is_origin=False)

    def _on_input_gradient(self, call: _Call, grad: Tensor) -> None:
        self._clock += 1
        if is_bad(grad):
            is_origin = call.was_given_finite is True
            given = ", of whose output the gradient is finite," if is_origin else ""
            self._see(f"the gradient of the input of {call.title}{given}", grad, is_origin)

    def _on_parameter(self, name: str, param: nn.Parameter) -> None:
        self._clock += 1
        grad = native_grad(param)
        if grad is not None and is_bad(grad):
            self._see(f"the gradient of {name}", grad, is_origin=self._key not in self._backward)

    def _see(self, what: str, grad: Tensor, is_origin: bool) -> None:
        """Record the first bad gradient, and its origin once that is known."""
        seen = self._backward.get(self._key)
        if seen is not None and (seen.is_origin or not is_origin):
            return
        text = f"{what} is the first in the backward pass of micro-batch {self._key[1]}, with {describe(grad)}"
        if seen is None:
            _logger.warning("not finite: %s", text)
        self._backward[self._key] = _Sighting(seen.clock if seen else self._clock, text, is_origin)


def _view(tensor: Tensor) -> Tensor:
    """Return a view of the tensor that is a separate node in the graph.

    This is also done while a layer is recomputed, where no hook is needed: layers that share an input detect that by
    its identity, and must do so both times.
    """
    return tensor.view_as(tensor) if tensor.requires_grad and _may_look(tensor) else tensor


def _may_look(tensor: Tensor) -> bool:
    """Return whether the values are available: a collective still writes to tensors that have attributes."""
    return tensor.is_floating_point() and not vars(tensor)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors in arguments or outputs, with their names or positions."""
    if isinstance(value, Tensor):
        if _may_look(value):
            yield name or "0", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors(item, name or str(index))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to each tensor in arguments; containers of other types are left unchanged."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    return value
