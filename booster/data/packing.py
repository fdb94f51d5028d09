"""Packed data sets: documents of any length in rows of at most a number of tokens, their collator and their sampler."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from booster.data.rows import ATTENTION_LENGTH, cost_of
from booster.errors import ConfigurationError


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


IGNORE_INDEX = -100


class PackingCollator:
    """Puts rows of documents one behind the other into a batch of one row, [1, tokens].

    Args:
        cu_seq_lens: whether to add the borders of the documents, `cu_seq_lens_q/k` [documents + 1] (int32), and the
            length of the longest one, `max_length_q/k`, for a plain model with flash-attn.
    """

    def __init__(self, cu_seq_lens: bool = False) -> None:
        self.cu_seq_lens = cu_seq_lens

    def __call__(self, rows: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Any]:
        """Return `input_ids`, `labels` and `position_ids`, each [1, tokens] (int64).

        Positions restart at each document, and the label of its first token is -100: the loss of heads that predict
        the next token crosses no border.

        Args:
            rows: items of a `PackedDataset`: for each row the `input_ids` and `labels`, [tokens], of its documents.
        """
        documents = [document for row in rows for document in row]
        ids = [document["input_ids"] for document in documents]
        labels = [F.pad(document["labels"][1:], (1, 0), value=IGNORE_INDEX) for document in documents]
        lengths = torch.tensor([len(each) for each in ids])
        batch: dict[str, Any] = {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat(labels)[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        }
        if self.cu_seq_lens:
            borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
            longest = int(lengths.max())
            batch |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders.clone()}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


Document = dict[str, Tensor]
Piece = tuple[int, int, int]  # (item of the data set, its first token, the token behind its last)
_TOO_LONG = ("refuse", "truncate", "split")


def pack(
    dataset: Dataset | Sequence[Any],
    max_tokens: int,
    *,
    too_long: str = "refuse",
    shuffle: bool = True,
    seed: int = 0,
    rows_per_step: int = 8,
    attention_length: int = ATTENTION_LENGTH,
    lengths: Sequence[int] | None = None,
) -> PackedDataset:
    """Pack the documents of a data set into rows of at most `max_tokens` tokens, first fit.

    Args:
        dataset: items with `input_ids` and, optionally, `labels`, both [tokens], or token ids alone. Items without
            tokens take no part.
        max_tokens: token budget of a row.
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
    _check(dataset, max_tokens, too_long, rows_per_step, attention_length, lengths)
    if lengths is None:
        lengths = [len(_ids_of(dataset[index])) for index in range(len(dataset))]
    pieces = list(_pieces(lengths, max_tokens, too_long))
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
        ids = _tensor(_ids_of(item))
        given = item.get("labels") if isinstance(item, Mapping) else None
        labels = ids if given is None else _tensor(given)
        if len(ids) < end or labels.shape != ids.shape:
            raise ConfigurationError(
                f"item {index} of the data set has {len(ids)} input_ids and {len(labels)} labels, and was packed as a "
                f"document of {end} tokens or more; give each token a label, and pack() the true lengths"
            )
        return {"input_ids": ids[start:end], "labels": labels[start:end]}


def _check(
    dataset: Any,
    max_tokens: int,
    too_long: str,
    rows_per_step: int,
    attention_length: int,
    lengths: Sequence[int] | None,
) -> None:
    counts = {"max_tokens": max_tokens, "rows_per_step": rows_per_step, "attention_length": attention_length}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name}={value!r} is no positive integer; use 1 or more")
    if too_long not in _TOO_LONG:
        raise ConfigurationError(f"too_long={too_long!r} is unknown; use {', '.join(map(repr, _TOO_LONG))}")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"the data set is a {type(dataset).__name__}, whose documents cannot be read by their number; give pack() "
            "one with __len__ and __getitem__"
        )
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigurationError(
            f"lengths has {len(lengths)} entries for a data set of {len(dataset)} items; give one for each"
        )


def _pieces(lengths: Sequence[int], max_tokens: int, too_long: str) -> Iterator[Piece]:
    for index, length in enumerate(lengths):
        if length > max_tokens and too_long == "refuse":
            raise ConfigurationError(
                f"document {index} has {length} tokens, more than max_tokens={max_tokens}; use "
                f"max_tokens={max(lengths)}, too_long='truncate' or too_long='split'"
            )
        whole = min(length, max_tokens) if too_long == "truncate" else length
        for start in range(0, whole, max_tokens):
            yield index, start, min(start + max_tokens, whole)


def _ids_of(item: Any) -> Any:
    if isinstance(item, Mapping) and "input_ids" not in item:
        raise ConfigurationError(
            f"an item of the data set has {', '.join(map(str, item))}, and no input_ids; give pack() tokens"
        )
    return item["input_ids"] if isinstance(item, Mapping) else item


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.long)


# ----- first-fit packing: each document goes into the first row that has room for it -----


def first_fit(lengths: Iterable[int], room: int) -> list[list[int]]:
    """Put lengths into rows, each into the first row that has room.

    The number of rows is at most 1.7 times the least possible (Dósa, Sgall: First Fit bin packing: a tight analysis,
    2013), and close to it where most lengths are small. A tree of the rooms that are left finds the row in
    logarithmic time.

    Args:
        lengths: positive, and at most `room`.
        room: tokens of a row.

    Returns:
        For each row, indices of its lengths in their order.
    """
    rows: list[list[int]] = []
    left = _MostRoom(room)
    for index, length in enumerate(lengths):
        row = left.first_with(length)
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        left.take(row, length)
    return rows


class _MostRoom:
    """Binary tree over rows, whose inner nodes hold the most room that a row below them has; it grows as needed."""

    def __init__(self, room: int) -> None:
        self._room, self._num_leaves = room, 1
        self._most = [0, room]

    def first_with(self, length: int) -> int:
        """Return the first row that has room for `length`; a row that was not used yet has all of its room."""
        if self._most[1] < length:
            self._grow()
        node = 1
        while node < self._num_leaves:
            node = 2 * node if self._most[2 * node] >= length else 2 * node + 1
        return node - self._num_leaves

    def take(self, row: int, length: int) -> None:
        """Use `length` of the room of a row."""
        node = row + self._num_leaves
        self._most[node] -= length
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def _grow(self) -> None:
        """Double the number of rows."""
        leaves = self._most[self._num_leaves :] + [self._room] * self._num_leaves
        self._num_leaves *= 2
        self._most = [0] * self._num_leaves + leaves
        for node in range(self._num_leaves - 1, 0, -1):
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
