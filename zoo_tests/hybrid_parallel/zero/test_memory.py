"""What ZeRO-1 is for: every data-parallel rank holds its share of the optimizer's state and no more.

What breaks here first: padding, or a state that is kept on every rank. Look in
`plugins/hybrid_parallel/zero/bucket.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
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
        bucket.finish(set(range(len(bucket.params))), None)
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
