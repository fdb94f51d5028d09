"""Search for the origin of nan and inf. It runs only after a bad step, so that a good step pays nothing for it.

Every rank checks what it still has of the step (weights, inputs, losses, gradients). The findings are gathered and
sorted in causal order, so that all ranks report the same.

StepTrace: references to the data of a step, kept until its optimizer has stepped. It makes no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster.errors import NonFiniteError
from booster.logging import get_logger
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from shardformer.distributed.process_groups import all_gather_json

if TYPE_CHECKING:
    from plugins.hybrid_parallel.debug.module_hooks import ModuleWatch

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


Microbatches = Sequence[Mapping[str, Any]]


class StepTrace:
    """Inputs and losses of the passes since the last step of an optimizer.

    Attributes:
        microbatches: the micro-batches of the last pass.
        losses: for each pass, (micro-batch, share of the loss) pairs in the order of its backward passes.
        watch: observer of single modules, in debug mode.
    """

    def __init__(self) -> None:
        self.microbatches: Microbatches = ()
        self.losses: list[list[tuple[int, Tensor]]] = []
        self.watch: ModuleWatch | None = None
        self._is_over = False

    def begin(self, microbatches: Microbatches, losses: list[tuple[int, Tensor]]) -> None:
        """Begin a pass; `losses` is filled while it runs."""
        if self._is_over:
            self.losses, self._is_over = [], False
            if self.watch is not None:
                self.watch.forget()
        self.microbatches = microbatches
        self.losses.append(losses)
        if self.watch is not None:
            self.watch.begin_pass(len(self.losses) - 1)

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of an ordinary loop, in which a pass has one micro-batch."""
        if not self.losses or self._is_over:
            self.begin((), [])
        self.losses[-1].append((0, loss))

    def end_step(self) -> None:
        """Record that an optimizer takes its step; the data stays readable until the next pass begins."""
        self._is_over = True

    def accept(self) -> None:
        """Record that the step's gradients are finite."""
        if self.watch is not None:
            self.watch.accept()


def first_findings(optimizer: HybridParallelOptimizer, trace: StepTrace, mesh: HybridMesh) -> list[Finding]:
    """Return the first finding of each kind over all ranks, in causal order; must be called on all ranks."""
    here = [*_weights(optimizer, mesh), *_inputs(trace, mesh), *_losses(trace, mesh), *_gradients(optimizer, mesh)]
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


def refuse_or_skip(optimizer: HybridParallelOptimizer, trace: StepTrace, mesh: HybridMesh) -> None:
    """Raise an error, or log why a step is skipped; must be called on all ranks.

    Raises:
        NonFiniteError: if the optimizer's policy is to raise, or if a weight is bad, which no later step can repair.
    """
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
            order = (is_tied, -mesh.rank("pp"), arrival.get(param, len(arrival)), int(not is_own))
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
