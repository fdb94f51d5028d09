"""Assignment of layers to pipeline stages, balanced by the time that each stage takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from torch import nn


def balanced_split(
    costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0, never_first: Collection[int] = ()
) -> list[int]:
    """Split consecutive layers into stages so that the cost of the most expensive stage is minimal.

    Every stage gets at least one layer. Ties are broken by the smallest sum of squared stage costs.

    Args:
        costs: cost of each layer.
        num_stages: number of stages.
        first, last: additional costs of the first and the last stage.
        never_first: numbers of layers that cannot be the first of a stage.

    Returns:
        Number of layers in each stage.

    Raises:
        ValueError: fewer layers than stages may begin a stage.
    """
    starts = len(set(range(len(costs))) - {*never_first} | {0})
    if starts < num_stages:
        raise ValueError(
            f"pp_size={num_stages} is larger than the number of layers that may begin a stage, {starts} of "
            f"{len(costs)}; use a pp_size of at most {starts}"
        )
    until = list(accumulate(costs, initial=0.0))
    count = len(costs)
    # best[stage][end]: `end` layers in `stage + 1` stages -> ((largest cost, sum of squares), start of the last stage).
    best: list[dict[int, tuple[tuple[float, float], int]]] = []
    for stage in range(num_stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        row: dict[int, tuple[tuple[float, float], int]] = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            choices = []
            for begin in [0] if stage == 0 else best[-1]:
                if begin < end and (begin == 0 or begin not in never_first):
                    cost = until[end] - until[begin] + extra
                    largest, squares = (0.0, 0.0) if stage == 0 else best[-1][begin][0]
                    choices.append(((max(largest, cost), squares + cost * cost), begin))
            if choices:
                row[end] = min(choices, key=lambda choice: (choice[0], -choice[1]))
        best.append(row)
    counts, end = [], count
    for row in reversed(best):
        begin = row[end][1]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def matrix_cost(module: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> float:
    """Estimate the cost of a forward pass for one token: the number of elements of all weight matrices.

    Embedding tables are excluded, because a lookup takes almost no time. Attention scores are excluded, because their
    cost depends on the sequence length and is the same in all layers.

    Args:
        module: the module to estimate.
        counts: whether to include the module of a given name.
    """
    return float(
        sum(
            param.numel()
            for name, each in module.named_modules()
            if not isinstance(each, nn.Embedding) and counts(name)
            for param in each.parameters(recurse=False)
            if param.dim() > 1
        )
    )
