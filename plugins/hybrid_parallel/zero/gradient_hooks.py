"""GradientHooks: runs the user's parameter hooks on the gradients that plain torch would give them.

In a backward pass a rank has only the gradients of its own samples, one micro-batch at a time, and only its shard of a
sharded parameter. A hook that applies a mask would work on these, a clamp or a norm would not. So hooks are taken off
the parameters when the model is boosted, and run once per pass on whole, reduced, unscaled gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import LossScale, scaled, unscaled
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer.distributed.random import SharedStream
from shardformer.shard_spec import spec_of

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
_STREAM = 0x5EED  # keeps the stream apart from the streams of models


class GradientHooks:
    """Gradient hooks of one optimizer's parameters.

    Args:
        hooks: local parameter -> its hooks, as `take_hooks` returned them.
        names: local parameter -> its name, in the same order on every rank.
        mesh: the grid of ranks.
        loss_scale: the scale of the gradients.
        seed: for random numbers drawn in hooks; the same on every rank, because ranks keep shards of one gradient.
    """

    def __init__(
        self,
        hooks: Mapping[nn.Parameter, Hooks],
        names: Mapping[nn.Parameter, str],
        mesh: HybridMesh,
        loss_scale: LossScale,
        seed: int,
    ) -> None:
        self._hooks, self._names, self._mesh, self._loss_scale = dict(hooks), names, mesh, loss_scale
        self._stream = SharedStream(seed + _STREAM) if dist.get_world_size() > 1 else None

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    @torch.no_grad()
    def run(self, buckets: Sequence[Bucket], used: Sequence[set[int]]) -> None:
        """Run the hooks on the reduced gradients of this pass, and store the gradients that they return.

        Must be called on all ranks, before gradients are added to the sum over earlier passes.

        Args:
            buckets: buckets with reduced gradients.
            used: for each bucket, the indices of parameters that have a gradient.

        Raises:
            ConfigurationError: if a hook returned a tensor of another shape.
        """
        # By name: tensor-parallel ranks sort their parameters into different buckets.
        for name, param, local, (bucket, index) in sorted(self._reduced(buckets, used), key=lambda item: item[0]):
            spec = spec_of(param)
            scale = self._loss_scale.value
            whole = unscaled(assemble(param, local, self._mesh.group(spec.axis)), scale)
            with nullcontext() if self._stream is None else self._stream.active():
                for hook in list(self._hooks[param].values()):
                    returned = hook(whole)
                    whole = whole if returned is None else returned
            if tuple(whole.shape) != spec.full_shape:
                raise ConfigurationError(
                    f"the gradient hook of {name} returned a tensor of shape {tuple(whole.shape)}; return one of the "
                    f"whole gradient's shape {spec.full_shape}"
                )
            bucket.replace_reduced(index, spec.shard(scaled(whole, scale)))

    def _reduced(
        self, buckets: Sequence[Bucket], used: Sequence[set[int]]
    ) -> Iterator[tuple[str, nn.Parameter, Tensor, tuple[Bucket, int]]]:
        """Yield name, parameter, local gradient and (bucket, index) for parameters with hooks and a gradient."""
        for bucket, indices in zip(buckets, used, strict=True):
            mine = [index for index in sorted(indices) if self._hooks.get(bucket.params[index])]
            if not mine:
                continue
            gathered = bucket.gather_pieces(bucket.reduced_pieces(mine), bucket.grad_dtype)
            for index in mine:
                param = bucket.params[index]
                yield self._names[param], param, gathered[index], (bucket, index)


def take_hooks(parameter: nn.Parameter) -> Hooks:
    """Take the hooks off a parameter and return them; handles that the user holds can still remove them."""
    hooks = parameter._backward_hooks or {}
    parameter._backward_hooks = None
    return hooks


def hooked_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters with gradient hooks, which all ranks must run together."""
    return [name for name, parameter in model.named_parameters() if parameter._backward_hooks]


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that read gradients before these are complete.

    Raises:
        ConfigurationError: if `register_post_accumulate_grad_hook` was called on a parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would run before its gradient is "
                "summed over micro-batches and ranks; use register_hook, which runs on the whole gradient"
            )
