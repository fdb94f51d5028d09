"""Sentence pairs as tensors: examples, their order in each epoch, and padded batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


@dataclass(frozen=True)
class SentencePair:
    """One example: two sentences, and label 1 if the task's relation holds between them, else 0."""

    first: str
    second: str
    label: int


class PairDataset(Dataset[dict[str, Any]]):
    """Tokenized pairs; an item has `input_ids`, `token_type_ids`, `attention_mask` (lists) and `labels` (0 or 1)."""

    def __init__(self, pairs: list[SentencePair], tokenizer: Any, max_length: int) -> None:
        self._labels = [pair.label for pair in pairs]
        self._encodings = tokenizer(
            [pair.first for pair in pairs],
            [pair.second for pair in pairs],
            truncation=True,
            max_length=max_length,
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {name: values[index] for name, values in self._encodings.items()}
        return {**item, "labels": self._labels[index]}


class EpochOrder(Sampler[int]):
    """A permutation of the samples that depends on the seed and `epoch` only.

    Every rank, every layout and a resumed run therefore see the same samples in the same order.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self._num_samples, generator=generator).tolist())


def train_loader(
    dataset: PairDataset, tokenizer: Any, batch_size: int, seed: int, length: int | None = None
) -> DataLoader:
    """Create a loader of batches in `EpochOrder`, including a last short batch."""
    order = EpochOrder(len(dataset), seed)
    return DataLoader(dataset, batch_size=batch_size, sampler=order, collate_fn=padding_collate(tokenizer, length))


def eval_loader(dataset: PairDataset, tokenizer: Any, batch_size: int, length: int | None = None) -> DataLoader:
    """Create a loader that yields every sample once, in file order."""
    return DataLoader(dataset, batch_size=batch_size, collate_fn=padding_collate(tokenizer, length))


def padding_collate(tokenizer: Any, length: int | None = None) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return a collate function that makes [B, L] tensors and `labels` [B]; L is `length`, or the longest sample's."""

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        padding = "longest" if length is None else "max_length"
        batch = tokenizer.pad(items, padding=padding, max_length=length, return_tensors="pt")
        return dict(batch)

    return collate


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of optimizer steps in one pass, including one for a last short batch."""
    return math.ceil(num_samples / global_batch_size)
