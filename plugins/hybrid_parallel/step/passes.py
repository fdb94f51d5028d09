"""What surrounds a pass through a model: entered here for every loop, so that no loop forgets an option.

The callers are `execute_pipeline`, `model(**batch)` on one stage and on several, `model.generate`, and
`booster.backward` under a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster import failure
from plugins.hybrid_parallel.data.checks import naming_entry
from plugins.hybrid_parallel.data.media import kinds_of_media, parameters_of_texts
from plugins.hybrid_parallel.distributed.agreement import naming_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


class PassKind(Enum):
    """What a pass is for: a STEP runs forward and backward; TRAIN only forward, and BACKWARD may follow later."""

    STEP = "step"
    TRAIN = "train"
    EVALUATE = "evaluate"
    GENERATE = "generate"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Pass:
    """A pass through a model, in one or several micro-batches.

    Attributes:
        kind: what it is for.
        batch: the arguments of the model's forward, on the device; None if they are not known.
        has_rows: whether this replica has samples; a pass on placeholders has none.
    """

    kind: PassKind
    batch: Mapping[str, Any] | None = None
    has_rows: bool = True

    @property
    def trains(self) -> bool:
        """Whether gradients of its forward passes are needed."""
        return self.kind in (PassKind.STEP, PassKind.TRAIN)

    @property
    def generates(self) -> bool:
        """Whether it makes tokens, for which nothing is trained or drawn from the model's stream."""
        return self.kind is PassKind.GENERATE


AroundPass = Callable[[Pass], AbstractContextManager[Any]]  # what a feature hangs into `model.around_passes`


@contextmanager
def in_pass(
    model: HybridParallelModel,
    this: Pass,
    inputs: Sequence[Mapping[str, Any]] = (),
    reading: AbstractContextManager[Any] | None = None,
) -> Iterator[None]:
    """Run a pass in this context; all ranks of the model enter it together.

    Args:
        inputs: arguments of each forward pass, as many on all replicas.
        reading: context in which heads give what the loss reads.

    Raises:
        ConfigurationError: if a parameter has been replaced since `boost`.
    """
    if this.kind is not PassKind.GENERATE:
        model.check_weights()
    for optimizer in model.optimizers:
        optimizer.wait_for_parameters()
    with ExitStack() as stack:
        if this.batch is not None:
            shapes = {name: list(value.shape) for name, value in this.batch.items() if isinstance(value, Tensor)}
            failure.begin_batch(model.mesh.rank("dp"), shapes)
            stack.enter_context(naming_ranks())
            stack.enter_context(naming_entry(this.batch))
        stack.enter_context(model.gathers.running())
        for around in model.around_passes:
            stack.enter_context(around(this))
        if this.kind is not PassKind.BACKWARD:
            stack.enter_context(torch.set_grad_enabled(this.trains))
        if reading is not None:
            stack.enter_context(reading)
        if this.kind is PassKind.STEP:
            for optimizer in model.optimizers:
                stack.enter_context(optimizer.accepting_gradients())
        if inputs:
            _agree_on_media(model, inputs)
        if this.kind is PassKind.STEP and model.runtime.recorder is not None:
            stack.enter_context(model.runtime.recorder.step())
        yield


def _agree_on_media(model: HybridParallelModel, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Gather the towers of images and sounds now, if under ZeRO stage 3 some replicas alone are about to run them."""
    if not model.gathers or not model.options.media_tokens or model.mesh.size(DP_CP) == 1:
        return
    flags = torch.tensor([kinds_of_media(each) for each in inputs], dtype=torch.int32)
    extremes = torch.stack([flags, -flags])  # on the CPU: reading the result must not wait for the device
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=model.mesh.group(DP_CP))
    if (extremes[0] != -extremes[1]).any():
        model.gathers.keep_all_but(parameters_of_texts(model.options.inside))
