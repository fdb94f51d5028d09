"""A change of weights by the user's optimizer: its step, the evaluations of a closure in it, and its other methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.loss.loss_scale import LossScale
from plugins.hybrid_parallel.zero.whole_parameters import WholeParameters


class ChangesWeights(Protocol):
    """A boosted optimizer, as the functions here use it."""

    mesh: HybridMesh
    wholes: WholeParameters

    def begin_update(self) -> None:
        """Wait until this rank may change the parameters, and take over changes by other code."""

    def publish(self, overlaps: bool = False) -> None:
        """Write updated values to the parameters of all ranks."""

    def refuse_missed_pass(self) -> None:
        """Refuse a pass that has left no gradients."""

    def take_gradients(self) -> None:
        """Complete, unscale and clip the gradients since the last call, and assign them to the pieces."""


@contextmanager
def updating(optimizer: ChangesWeights, overlaps: bool = False) -> Iterator[None]:
    """Let the user's optimizer change its parameters in this context; afterwards all ranks have the new values.

    Args:
        overlaps: whether the all-gather of parameters may run until the next forward pass.
    """
    optimizer.begin_update()
    optimizer.wholes.gather_values()
    yield
    optimizer.wholes.scatter_values()
    optimizer.wholes.release()
    optimizer.publish(overlaps)


def evaluation(optimizer: ChangesWeights, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure for the user's optimizer, which runs `closure` with the weights as it has changed them by then.

    It may evaluate the closure as often as it likes: each time all ranks first get the present weights, and then the
    optimizer gets the gradients that the closure has left, and the loss that they belong to: the mean over replicas.
    """

    def evaluate() -> Any:
        with torch.no_grad():
            optimizer.wholes.scatter_values()
            optimizer.publish()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            optimizer.refuse_missed_pass()
            optimizer.take_gradients()
            optimizer.begin_update()
            optimizer.wholes.gather_gradients()
            return _mean(loss, optimizer.mesh.group(DP_CP))

    return evaluate


def _mean(loss: Any, group: ProcessGroup) -> Any:
    """Return the mean over ranks of a number or a 0-d tensor, the same on all of them."""
    size = dist.get_world_size(group)
    if size == 1 or not isinstance(loss, Tensor | float):
        return loss
    mean = torch.as_tensor(loss).detach().clone()
    dist.all_reduce(mean, group=group)
    mean /= size
    return mean if isinstance(loss, Tensor) else mean.item()


def check_closure(loss_scale: LossScale, nonfinite: str) -> None:
    """Refuse a closure if the step may have to be skipped: the optimizer may have changed weights before.

    Raises:
        ConfigurationError: if gradients that are not finite skip a step.
    """
    reason = "precision='fp16'" if loss_scale.watches_overflow else "nonfinite='skip'" if nonfinite == "skip" else None
    if reason is not None:
        raise ConfigurationError(
            f"optimizer.step(closure) cannot skip a step in the middle, as {reason} asks for; use precision='bf16' or "
            "'fp32' with nonfinite='raise', or run the model before optimizer.step()"
        )


def refuse_average(name: str | None) -> None:
    """Refuse to train on, save or load training states while the parameters have the values of an average.

    Raises:
        ConfigurationError: if an average is applied.
    """
    if name is not None:
        raise ConfigurationError(
            f"the parameters have the values of the average {name!r} now; leave `with ema.applied():` before "
            "optimizer.step(), ema.update(), or saving or loading a checkpoint; save_model in it writes the average"
        )
