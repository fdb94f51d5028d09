"""Packed data sets: documents of any length in rows of at most a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from booster.data.packed_rows import Document, PackedSampler, PackingCollator, first_fit, ids_of, labels_of, parts_of
from booster.data.rows import ATTENTION_LENGTH, cost_of
from booster.data.stream import PackedStream
from booster.errors import ConfigurationError

Piece = tuple[int, int, int]  # (item of the data set, its first token, the token behind its last)
_TOO_LONG = ("refuse", "truncate", "split")


def pack(
    dataset: Dataset | Iterable[Any],
    max_tokens: int,
    *,
    tokenize: Callable[[Any], Any] | None = None,
    too_long: str = "refuse",
    shuffle: bool = True,
    seed: int = 0,
    rows_per_step: int = 8,
    attention_length: int = ATTENTION_LENGTH,
    lengths: Sequence[int] | None = None,
) -> PackedDataset | PackedStream:
    """Pack the documents of a data set into rows of at most `max_tokens` tokens, first fit.

    Args:
        dataset: items with `input_ids` and, optionally, `labels`, both [tokens], or token ids alone. Items without
            tokens take no part. One without numbers (an iterable data set, a generator) is packed while it is read.
        max_tokens: token budget of a row.
        tokenize: makes such an item of what the data set has, in the workers of the loader. The data set is then
            packed while it is read, whatever it is.
        too_long: what to do with documents of more tokens: "refuse", "truncate" to the first `max_tokens`, or "split"
            into documents of their own.
        shuffle: whether documents are packed, and rows ordered, at random; otherwise both are in the order of the data.
        seed: of the random order; the packing is the same in each epoch, the order of the rows is not.
        rows_per_step: rows of one step over all replicas, `batch_size * dp_size`. Rows that have nearly the same cost
            come together in groups of this size.
        attention_length: length of a document at which attention costs as much as the linear layers, 12 times the
            hidden size of a usual model.
        lengths: tokens of each item, if they are known; otherwise each item is read once.

    Raises:
        ConfigurationError: for a wrong option, a data set without length, or a document that is too long.
    """
    is_stream = tokenize is not None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _check(dataset, max_tokens, too_long, rows_per_step, attention_length, lengths, is_stream)
    if is_stream:
        options = (max_tokens, tokenize, too_long, seed if shuffle else None, rows_per_step, attention_length)
        return PackedStream(dataset, *options)
    if lengths is None:
        lengths = [len(ids_of(dataset[index])) for index in range(len(dataset))]
    longest = max(lengths, default=0)
    pieces: list[Piece] = [
        (index, *part)
        for index, length in enumerate(lengths)
        for part in parts_of(index, length, max_tokens, too_long, longest)
    ]
    if not pieces:
        raise ConfigurationError(f"the data set of {len(lengths)} items has no token; give it documents")
    if shuffle:
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
        pieces = [pieces[index] for index in order]
    found = first_fit([end - start for _, start, end in pieces], max_tokens)
    rows = [[pieces[index] for index in row] for row in found]
    costs = [sum(cost_of(end - start, attention_length) for _, start, end in row) for row in rows]
    sampler = PackedSampler(costs, rows_per_step, seed if shuffle else None)
    return PackedDataset(dataset, rows, max_tokens, sampler)


class PackedDataset(Dataset[list[Document]]):
    """Rows of documents; made by `pack`.

    Args:
        dataset: the documents.
        rows: the pieces of documents in each row.
        max_tokens: token budget of a row.
        sampler: yields the rows of an epoch.
    """

    def __init__(
        self, dataset: Dataset | Sequence[Any], rows: Sequence[Sequence[Piece]], max_tokens: int, sampler: PackedSampler
    ) -> None:
        self.dataset, self.rows, self.max_tokens, self.sampler = dataset, rows, max_tokens, sampler

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Document]:
        """Return the documents of a row: `input_ids` and `labels`, each [tokens] (int64)."""
        return [self._document(*piece) for piece in self.rows[row]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(end - start for row in self.rows for _, start, end in row)

    @property
    def fill(self) -> float:
        """The part of the token budget of all rows that is used, 0.0 to 1.0."""
        return self.num_tokens / (len(self) * self.max_tokens)

    def loader(self, batch_size: int = 1, cu_seq_lens: bool = False, **options: Any) -> DataLoader:
        """Return a loader of batches of one row, [1, tokens], to be passed to `boost`.

        Args:
            batch_size: packed rows that are put one behind the other, for one replica.
            cu_seq_lens: see `PackingCollator`.
            options: further options of torch's `DataLoader`.
        """
        collator = PackingCollator(cu_seq_lens)
        return DataLoader(self, batch_size, sampler=self.sampler, collate_fn=collator, **options)

    def _document(self, index: int, start: int, end: int) -> Document:
        item = self.dataset[index]
        ids = torch.as_tensor(ids_of(item), dtype=torch.long)
        labels = labels_of(item, ids, f"item {index} of the data set", end)
        return {"input_ids": ids[start:end], "labels": labels[start:end]}


def _check(
    dataset: Any,
    max_tokens: int,
    too_long: str,
    rows_per_step: int,
    attention_length: int,
    lengths: Sequence[int] | None,
    is_stream: bool,
) -> None:
    counts = {"max_tokens": max_tokens, "rows_per_step": rows_per_step, "attention_length": attention_length}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name}={value!r} is no positive integer; use 1 or more")
    if too_long not in _TOO_LONG:
        raise ConfigurationError(f"too_long={too_long!r} is unknown; use {', '.join(map(repr, _TOO_LONG))}")
    if is_stream and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(f"the data set is a {type(dataset).__name__}; give pack() one that yields documents")
    if is_stream and lengths is not None:
        raise ConfigurationError(
            "lengths= is for data sets whose items have numbers, and this one is packed while it is read; leave it out"
        )
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigurationError(
            f"lengths has {len(lengths)} entries for a data set of {len(dataset)} items; give one for each"
        )
