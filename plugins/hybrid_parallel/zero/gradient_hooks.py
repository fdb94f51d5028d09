"""GradientHooks: the hooks that a user registered on parameters, run on the gradients that plain torch would give them.

In a backward pass a rank has the share of its own samples, micro-batch by micro-batch, and its piece of a parameter
that is cut. A mask would do there, a clamp or a norm would not. So hooks are taken off the parameters when the model is
boosted, and run once a pass on whole, reduced, unscaled gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.loss_scale import LossScale
from plugins.hybrid_parallel.zero.assemble import assemble
from plugins.hybrid_parallel.zero.bucket import Bucket
from shardformer.distributed.random import SharedStream
from shardformer.shard_spec import spec_of

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
_STREAM = 0x5EED  # apart from the streams of models


class GradientHooks:
    """The hooks of one optimizer's parameters.

    Args:
        hooks: local parameter -> its hooks, as `take_hooks` returned them.
        names: local parameter -> its name, which every rank has in the same order.
        mesh: the grid of ranks.
        loss_scale: of the gradients.
        seed: of what hooks draw: the same on every rank, which go on with pieces of one gradient.
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
        """Give the reduced gradients of this pass to their hooks, and put what these return in their place.

        To be called on all ranks, before gradients are added to those of earlier passes.

        Args:
            buckets: whose gradients are reduced.
            used: of each bucket, the parameters that have a gradient.

        Raises:
            ConfigurationError: a hook returned a tensor of another shape.
        """
        # By name: tensor-parallel ranks sort their parameters into other buckets.
        for name, param, local, (bucket, index) in sorted(self._reduced(buckets, used), key=lambda item: item[0]):
            spec = spec_of(param)
            scale = self._loss_scale.value
            whole = assemble(param, local, self._mesh.group(spec.axis)) / scale
            with nullcontext() if self._stream is None else self._stream.active():
                for hook in list(self._hooks[param].values()):
                    returned = hook(whole)
                    whole = whole if returned is None else returned
            if tuple(whole.shape) != spec.full_shape:
                raise ConfigurationError(
                    f"the gradient hook of {name} returned a tensor of shape {tuple(whole.shape)}; return one of the "
                    f"whole gradient's shape {spec.full_shape}"
                )
            bucket.replace_reduced(index, spec.shard(whole * scale))

    def _reduced(
        self, buckets: Sequence[Bucket], used: Sequence[set[int]]
    ) -> Iterator[tuple[str, nn.Parameter, Tensor, tuple[Bucket, int]]]:
        """Name, parameter, its local gradient, and its place, of the parameters that have hooks and a gradient."""
        for bucket, indices in zip(buckets, used, strict=True):
            mine = [index for index in sorted(indices) if self._hooks.get(bucket.params[index])]
            if not mine:
                continue
            gathered = bucket.gather_pieces(bucket.reduced_pieces(mine), bucket.grad_dtype)
            for index in mine:
                param = bucket.params[index]
                yield self._names[param], param, gathered[index], (bucket, index)


def take_hooks(parameter: nn.Parameter) -> Hooks:
    """The hooks of a parameter, which autograd forgets; who holds a handle can still remove his."""
    hooks = parameter._backward_hooks or {}
    parameter._backward_hooks = None
    return hooks


def hooked_names(model: nn.Module) -> list[str]:
    """The parameters with hooks on their gradients, which all ranks have to run together."""
    return [name for name, parameter in model.named_parameters() if parameter._backward_hooks]


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that work on gradients before these are complete.

    Raises:
        ConfigurationError: `register_post_accumulate_grad_hook` was called on a parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would run before its gradient is "
                "summed over micro-batches and ranks; use register_hook, which runs on the whole gradient"
            )
