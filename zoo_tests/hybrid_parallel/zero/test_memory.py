"""What ZeRO is for: every data-parallel rank holds its share of the states and no more, and few whole gradients.

What breaks here first: padding, or a state that is kept on every rank. Look in
`plugins/hybrid_parallel/zero/bucket.py`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero.bucket_layout import GradBufferPool
from plugins.hybrid_parallel.zero.reducer import KEPT_BUFFERS
from zoo_tests.harness.case import Recipe, share_of
from zoo_tests.harness.ranks import distributed


def _state_bytes(optimizer: Any) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in tensors if value.dim())


def _check_memory() -> None:
    """Every rank holds 1/dp of Adam's state; padding of the flat buffers is below 1 %."""
    recipe = Recipe(family="bert", head="masked_lm", precision="fp32")
    model = recipe.model()
    whole = sum(param.numel() for param in model.parameters())
    plugin = HybridParallelPlugin()
    model, optimizer = Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    for bucket in optimizer.buckets:
        bucket.accumulate(0, torch.ones_like(bucket.params[0]))
        bucket.launch()
        bucket.complete(None)
        bucket.keep(set(range(len(bucket.params))))
    optimizer.step()
    of_ranks = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    of_ranks[dist.get_rank()] = _state_bytes(optimizer)
    dist.all_reduce(of_ranks)
    assert of_ranks.sum() == whole * 2 * 4, "two fp32 states a parameter, each element on one rank"
    assert of_ranks.max() <= 1.01 * whole * 2 * 4 / plugin.dp_size
    padded = sum(bucket.flat.numel() for bucket in optimizer.buckets)
    assert padded <= 1.01 * whole


@distributed(2)
def test_each_of_two_replicas_holds_half_of_the_state() -> None:
    _check_memory()


@distributed(4)
def test_each_of_four_replicas_holds_a_quarter_of_the_state() -> None:
    _check_memory()


def most_whole_gradients(options: dict[str, Any]) -> tuple[int, int]:
    """Return how many buckets have local gradients at one time, and how many there are."""
    recipe = Recipe(family="llama", head="causal_lm", precision="fp32")
    model, most = recipe.model(), 0
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=1, **options))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    share = share_of(recipe.batch(0), dist.get_rank(), 2)

    def take(pool: GradBufferPool, *args: Any) -> Tensor:
        nonlocal most
        most = max(most, 1 + sum(bucket._flat_grads is not None for bucket in optimizer.buckets))
        return native(pool, *args)

    native = GradBufferPool.take
    with patch.object(GradBufferPool, "take", take):
        booster.execute_pipeline(iter([share]), model, optimizer=optimizer)
    return most, len(optimizer.buckets)


@distributed(2)
def test_few_whole_gradients_at_once_under_stage_three() -> None:
    """Norms of all layers share a bucket, which is complete at the end of a pass: the layers do not wait for it."""
    most, count = most_whole_gradients({"zero_stage": 3})
    assert count == 8  # five layers, embedding, head, norms
    assert most <= KEPT_BUFFERS + 1  # and that of the norms, which is small
