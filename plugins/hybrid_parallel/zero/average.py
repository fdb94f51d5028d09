"""ShardedEMA: an exponential moving average of the weights, of which each rank keeps its share.

It does what `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))` does, without a
second model: a rank averages the shards that its optimizers update, in at least fp32. Under ZeRO that is a part of what
the rank holds of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket, resident
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


class ShardedEMA:
    """Exponential moving average of the weights that boosted optimizers update.

    `booster.save_checkpoint` and `save_optimizer` save it with its optimizers, and loading restores it under any
    layout, if it was made before.

    Args:
        optimizers: all optimizers of a model, as `boost` returned them.
        decay: share of the average that an update keeps, in [0, 1].
        name: tells several averages of the same optimizers apart in checkpoints.

    Attributes:
        num_updates: updates so far. The first one copies the weights, as in torch.

    Raises:
        ConfigurationError: if an optimizer is not boosted, or has an average of this name, or the decay is no share.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer, decay: float = 0.999, name: str = "ema") -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigurationError(f"decay={decay} is not in [0, 1]; use a value such as 0.999")
        if not name or "/" in name:
            raise ConfigurationError(f"name={name!r} cannot be a part of a name in a checkpoint; use one such as 'ema'")
        for optimizer in optimizers or (None,):
            if not isinstance(optimizer, HybridParallelOptimizer):
                raise ConfigurationError(
                    f"ShardedEMA got {type(optimizer).__name__ if optimizer else 'no optimizer'}; give it the "
                    "optimizers that boost() returned"
                )
            if name in optimizer.averages:
                raise ConfigurationError(f"the optimizer has an average named {name!r}; give this one another name")
        self.decay, self.name, self.num_updates = decay, name, 0
        self._optimizers: Sequence[HybridParallelOptimizer] = optimizers
        self._shards: dict[Bucket, Tensor] = {}
        for optimizer in optimizers:
            optimizer.averages[name] = self
            self.add(optimizer.buckets)

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Average the weights of further buckets, of parameters that were frozen until now."""
        for bucket in resident(buckets):
            values, states = bucket.shard.values, bucket.options.states
            self._shards[bucket] = states.empty(len(values), bucket.grad_dtype, values.device).copy_(values)
            states.page_out(self._shards[bucket])

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average; call it on all ranks after the step of all optimizers."""
        for optimizer in self._optimizers:
            optimizer.take_changed_weights()
        for bucket in resident(self._shards):
            average = self._shards[bucket]
            values = bucket.shard.values.to(average.dtype)
            if self.num_updates == 0:
                average.copy_(values)
            else:
                average.lerp_(values, 1.0 - self.decay)
            bucket.options.states.page_out(average)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights in this context, to evaluate or to save it; on all ranks.

        Afterwards the model has the very same weights as before. Inside, `booster.save_model` writes the average.

        Raises:
            ConfigurationError: if another average is applied; inside, by steps, and by saving or loading a checkpoint.
        """
        for optimizer in self._optimizers:
            optimizer.wait_for_parameters()
            optimizer.begin_update()
        weights = {bucket: _copy_of_values(bucket) for bucket in resident(self._shards)}
        self._give(self._shards)
        for optimizer in self._optimizers:
            optimizer.applied_average = self.name
        try:
            yield
        finally:
            for optimizer in self._optimizers:
                optimizer.applied_average = None
            self._give(weights)
            for bucket, values in weights.items():
                bucket.options.states.release(values)

    @torch.no_grad()
    def _give(self, values: dict[Bucket, Tensor]) -> None:
        """Set the optimizers' values, and the parameters of all ranks."""
        for optimizer in self._optimizers:
            optimizer.begin_update()
        for bucket in resident(values):
            bucket.shard.values.copy_(values[bucket])
            bucket.options.states.page_out(values[bucket])
        for optimizer in self._optimizers:
            optimizer.publish()

    def piece_of(self, bucket: Bucket, piece: BucketSlice) -> Tensor:
        """Return the average of a piece of a parameter, as a view that may be written."""
        return piece.view(self._shards[bucket]).view(piece.parameter.shape)

    @torch.no_grad()
    def restart(self) -> None:
        """Forget the average: the next update copies the weights."""
        for bucket in resident(self._shards):
            average = self._shards[bucket].copy_(bucket.shard.values)
            bucket.options.states.page_out(average)
        self.num_updates = 0


def _copy_of_values(bucket: Bucket) -> Tensor:
    """Return a copy of the values that the optimizer updates, where its states are."""
    values, states = bucket.shard.values, bucket.options.states
    copy = states.empty(len(values), values.dtype, values.device).copy_(values)
    states.page_out(copy)
    return copy
