"""Which layers a pipeline stage gets: stages that take equal times, as far as whole layers allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import nn


def balanced_split(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Cut layers, in order, into stages, one at least in each, so that the costliest stage costs as little as possible.

    Of several such cuts the one with the least sum of squares is taken.

    Args:
        costs: of each layer.
        first, last: what the first and the last stage cost beside their layers.

    Returns:
        Number of layers of each stage.
    """
    until = list(accumulate(costs, initial=0.0))
    count = len(costs)
    # Behind `end` layers in `stage + 1` stages: ((largest cost, sum of squares), where the last of them begins).
    best: list[dict[int, tuple[tuple[float, float], int]]] = []
    for stage in range(num_stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        row: dict[int, tuple[tuple[float, float], int]] = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            choices = []
            for begin in [0] if stage == 0 else best[-1]:
                if begin < end:
                    cost = until[end] - until[begin] + extra
                    largest, squares = (0.0, 0.0) if stage == 0 else best[-1][begin][0]
                    choices.append(((max(largest, cost), squares + cost * cost), begin))
            row[end] = min(choices, key=lambda choice: (choice[0], -choice[1]))
        best.append(row)
    counts, end = [], count
    for row in reversed(best):
        begin = row[end][1]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def matrix_cost(module: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> float:
    """Time of a pass for one token, in multiplications: the elements of all matrices that are multiplied by.

    Tables of embeddings are looked up, which takes next to no time; what attention does with itself is left out, as it
    depends on the length and is the same in all layers.

    Args:
        counts: whether a module of that name is to be counted.
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
