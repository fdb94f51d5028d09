"""Search for the origin of nan and inf. It runs only after a bad step, so that a good step pays nothing for it.

Every rank checks what it still has of the step (weights, inputs, losses, gradients). The findings are gathered and
sorted in causal order, so that all ranks report the same. In debug mode, `ModuleWatch` checks every module on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster.errors import NonFiniteError
from booster.logging import get_logger
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import NATIVE_GRAD
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from shardformer.distributed.process_groups import all_gather_json
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.utils.untraced import in_backward

if TYPE_CHECKING:
    from plugins.hybrid_parallel.pipeline.runtime import StepTrace


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
            if isinstance(module, StagePlaceholder):  # its nan stands for what an earlier stage has
                continue
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
        grad = NATIVE_GRAD.__get__(param)
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


_logger = get_logger(__name__)

# In causal order: a nan weight makes the losses nan, and these make the gradients nan.
WEIGHT, INPUT, MODULE, LOSS, BACKWARD, GRADIENT = KINDS = ("weight", "input", "module", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Finding:
    """A non-finite value that a rank has found."""

    kind: str  # one of `KINDS`
    order: tuple[int, ...]  # position among findings of its kind; the smallest came first
    text: str  # description, with the number of bad values
    place: str = ""  # description of the rank; empty if the rank does not matter

    def __str__(self) -> str:
        return f"{self.text} on {self.place}" if self.place else self.text


def describe(tensor: Tensor) -> str:
    """Describe how many values of a tensor are nan or inf: "2 nan of 55 values"."""
    tensor = tensor.detach()
    num_nan, num_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    kinds = [f"{count} {kind}" for count, kind in ((num_nan, "nan"), (num_inf, "inf")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel()} values"


def is_bad(tensor: Tensor) -> bool:
    """Return whether a floating-point tensor has nan or inf."""
    # Detached: otherwise recomputation would count a tensor that autograd saves for this check.
    return not bool(torch.isfinite(tensor.detach()).all())


def first_findings(optimizer: HybridParallelOptimizer, trace: StepTrace, mesh: HybridMesh) -> list[Finding]:
    """Return the first finding of each kind over all ranks, in causal order; must be called on all ranks."""
    here = [*_weights(optimizer, mesh), *_inputs(trace, mesh), *_losses(trace, mesh), *_gradients(optimizer, mesh)]
    here += [Finding(MODULE, (-1, index), text, mesh.place) for index, text in enumerate(trace.causes())]
    if trace.watch is not None:
        here += trace.watch.findings(mesh)
    gathered = all_gather_json([asdict(found) for found in _first_of_each_kind(here)])
    return _first_of_each_kind(Finding(**found) for rank in gathered for found in rank)


def _first_of_each_kind(findings: Iterable[Finding]) -> list[Finding]:
    by_kind: dict[str, Finding] = {}
    for found in sorted(findings, key=lambda found: (KINDS.index(found.kind), list(found.order), found.place)):
        by_kind.setdefault(found.kind, found)
    return list(by_kind.values())


def report(optimizer: HybridParallelOptimizer, findings: list[Finding], is_watched: bool) -> str:
    """Describe a bad step in one sentence."""
    found = "; ".join(str(found) for found in findings) or "their norm is beyond the largest number"
    scale = optimizer.loss_scale
    at_floor = f", at the smallest loss scale of {scale.value:g}," if scale.watches_overflow else ""
    hint = "" if is_watched else ", debug=True or BOOSTER_DEBUG=1 to see the module where it began"
    return (
        f"gradients of step {optimizer.num_steps}{at_floor} are not finite: {found}; weights and optimizer are as "
        f"before the step; use nonfinite='skip' to leave such steps out{hint}"
    )


def on_nonfinite(optimizer: HybridParallelOptimizer, trace: StepTrace, mesh: HybridMesh) -> None:
    """Log, on all ranks, why a step is skipped; NonFiniteError by option, or for a bad weight, which stays."""
    findings = first_findings(optimizer, trace, mesh)
    text = report(optimizer, findings, trace.watch is not None)
    if optimizer.options.nonfinite == "raise" or any(found.kind == WEIGHT for found in findings):
        raise NonFiniteError(text)
    if torch.distributed.get_rank() == 0:
        _logger.warning("skipped: %s", text)


def _weights(optimizer: HybridParallelOptimizer, mesh: HybridMesh) -> Iterator[Finding]:
    """Yield the first parameter with a bad value, in the order of the model."""
    for position, (param, name) in enumerate(reversed(optimizer.names.items())):
        if param.is_floating_point() and is_bad(param):
            order = (mesh.rank("pp"), position, mesh.rank("dp"), mesh.rank("tp"))
            yield Finding(WEIGHT, order, f"the weight {name} itself has {describe(param)}", mesh.place)
            return


def _inputs(trace: StepTrace, mesh: HybridMesh) -> Iterator[Finding]:
    for index, microbatch in enumerate(trace.microbatches):
        for position, (key, value) in enumerate(microbatch.items()):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if "mask" in key:  # additive masks contain -inf
                value = value.masked_fill(value == -torch.inf, 0.0)
            if is_bad(value):
                order = (index, mesh.rank("dp"), mesh.rank("pp"), mesh.rank("tp"), position)
                text = f"the input '{key}' of micro-batch {index} has {describe(value)}"
                yield Finding(INPUT, order, text, mesh.place)


def _losses(trace: StepTrace, mesh: HybridMesh) -> Iterator[Finding]:
    for number, losses in enumerate(trace.losses):
        of_pass = f" of pass {number}" if len(trace.losses) > 1 else ""
        for index, loss in losses:
            if is_bad(loss):
                order = (number, index, mesh.rank("dp"), mesh.rank("tp"))
                yield Finding(LOSS, order, f"the loss of micro-batch {index}{of_pass} is {loss.item()}", mesh.place)


def _gradients(optimizer: HybridParallelOptimizer, mesh: HybridMesh) -> Iterator[Finding]:
    """Yield every bad gradient: this rank's own if it is still available, otherwise the reduced one."""
    arrival = optimizer.reducer.arrival
    for bucket in optimizer.buckets:
        for param, gradient, is_own in _bad_gradients(bucket):
            name = optimizer.names[param]
            # The gradient of a tied weight is a sum over its uses, so it may be bad before the weight is reached.
            is_tied = int(name in optimizer.aliases)
            order = (is_tied, -mesh.rank("pp"), arrival.get(id(param), len(arrival)), int(not is_own))
            text = f"the gradient of {name} is the first in the backward pass, with {describe(gradient)}"
            is_sum = not is_own and bucket.options.dp_group.size() > 1
            place = f"stage {mesh.rank('pp')} of the sum over all replicas" if is_sum else mesh.place
            yield Finding(GRADIENT, (*order, mesh.rank("dp"), mesh.rank("tp")), text, place)


def _bad_gradients(bucket: Bucket) -> Iterator[tuple[torch.nn.Parameter, Tensor, bool]]:
    own = bucket.local_grads()
    for index in sorted(bucket.used):
        if own is not None and is_bad(own[index]):
            yield bucket.params[index], own[index], True
    for piece in bucket.pieces if bucket.used else ():
        reduced = piece.view(bucket.shard_grads)
        if piece.index in bucket.used and is_bad(reduced):
            yield bucket.params[piece.index], reduced, bucket.options.dp_group.size() == 1 and not bucket.sum_groups
