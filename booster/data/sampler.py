"""Order of packed rows: rows of similar cost come together, in an order that a seed and the epoch determine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler


class PackedSampler(Sampler[int]):
    """Yields the numbers of rows, in groups of similar cost that come in random order.

    The replicas of a step then have equal work. The order depends on the seed, the epoch and the size of a group, and
    not on the number of replicas, so that training can resume under another layout.

    Args:
        costs: cost of each row.
        group: rows of a group.
        seed: of the order; None to yield the rows in their own order.

    Attributes:
        epoch: of the next iteration; it is counted by itself, and set by `set_epoch`.
    """

    def __init__(self, costs: Sequence[int], group: int, seed: int | None) -> None:
        self._costs, self._group, self._seed = costs, group, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._costs)

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self._seed is None:
            yield from range(len(self))
            return
        generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
        # Rows of equal cost are in random order first, so that they meet others in each epoch.
        shuffled = torch.randperm(len(self), generator=generator).tolist()
        by_cost = sorted(shuffled, key=lambda row: self._costs[row])
        # The one short group comes last: otherwise steps behind it would take from two groups.
        whole = len(self) // self._group
        first = int(torch.randint(whole + 1, (), generator=generator)) * self._group
        rest = len(self) % self._group
        last, by_cost = by_cost[first : first + rest], by_cost[:first] + by_cost[first + rest :]
        groups = [by_cost[start : start + self._group] for start in range(0, len(by_cost), self._group)]
        order = torch.randperm(len(groups), generator=generator).tolist()
        yield from itertools.chain.from_iterable([*(groups[index] for index in order), last])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the next iteration."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the epoch of the next iteration to a saved one."""
        self.epoch = state["epoch"]


def _mixed(seed: int, epoch: int) -> int:
    """Return a seed for one epoch: neighbouring seeds and epochs have different ones."""
    return (seed * 1_000_003 + epoch) % 2**63
