"""Packed streams: documents that come one after the other, tokenised in workers and packed into rows as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from booster.data.packed_rows import (
    Document,
    MostRoom,
    PackedSampler,
    PackingCollator,
    ids_of,
    labels_of,
    mixed,
    parts_of,
)
from booster.data.rows import cost_of
from booster.errors import ConfigurationError

# Documents of one message to a worker, and the least number of rows that are packed together.
_CHUNK, _WINDOW = 64, 64
# Options of torch's loader that are those of the processes that tokenise.
_OF_WORKERS = ("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")


@dataclass(frozen=True)
class _Place:
    """A place in a stream.

    Attributes:
        epoch: number of the epoch.
        row: number in the epoch of the first row of a window.
        document, token: the document that the window begins with, and its first token there.
        known: a document, and the state of the stream before it; None for one without a state.
        passed: rows to pass over from there.
    """

    epoch: int
    row: int = 0
    document: int = 0
    token: int = 0
    known: tuple[int, Any] | None = None
    passed: int = 0


class PackedStream(IterableDataset[list[Document]]):
    """Rows of the documents of a stream; made by `pack`.

    Windows of rows are filled one after the other: each document goes into the first row of the window that has room,
    and one that fits into none begins the next window. All windows but the last have `window_rows` rows, so the rows
    depend on the documents, the options and the epoch alone, not on workers or replicas.

    Args:
        dataset: yields documents; one that is iterated again yields them again.
        tokenize: makes a document with `input_ids` of what `dataset` yields; None if that is one.
        max_tokens, too_long, seed, rows_per_step, attention_length: see `pack`; `seed` is None for rows in their order.

    Attributes:
        epoch: of the next iteration; it is counted by itself, and set by `set_epoch`.
        worker_options: options of torch's `DataLoader` for the processes that tokenise.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        max_tokens: int,
        tokenize: Callable[[Any], Any] | None,
        too_long: str,
        seed: int | None,
        rows_per_step: int,
        attention_length: int,
    ) -> None:
        self.dataset, self.max_tokens, self.tokenize, self.too_long = dataset, max_tokens, tokenize, too_long
        self.seed, self.rows_per_step, self.attention_length = seed, rows_per_step, attention_length
        self.epoch = 0
        self.worker_options: dict[str, Any] = {}
        self._next: _Place | None = None  # where the next iteration begins; None for the start of an epoch
        self._windows: deque[_Place] = deque(maxlen=2)  # that the last iteration has begun

    @property
    def window_rows(self) -> int:
        """Rows that are packed together: a multiple of `rows_per_step`."""
        return self.rows_per_step * max(1, _WINDOW // self.rows_per_step)

    def loader(self, batch_size: int = 1, cu_seq_lens: bool = False, **options: Any) -> DataLoader:
        """Return a loader of batches of one row, [1, tokens], to be passed to `boost`.

        Args:
            batch_size: packed rows that are put one behind the other, for one replica.
            cu_seq_lens: see `PackingCollator`.
            options: further options of torch's `DataLoader`. The `num_workers` processes tokenise; this one reads
                the stream and packs.
        """
        self.worker_options = {name: options.pop(name) for name in _OF_WORKERS if name in options}
        return DataLoader(self, batch_size, collate_fn=PackingCollator(cu_seq_lens), **options)

    def __iter__(self) -> Iterator[list[Document]]:
        """Yield rows: for each the `input_ids` and `labels`, [tokens] (int64), of its documents."""
        if get_worker_info() is not None:
            raise ConfigurationError(
                "a packed stream was iterated in a worker of a DataLoader, and each worker would pack all of it; use "
                "num_workers=0 there and packed.loader(num_workers=…), whose workers tokenise"
            )
        place, self._next = self._next or _Place(self.epoch), None
        self.epoch = place.epoch + 1
        self._windows.clear()
        return self._rows(place)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also of a stream that has `set_epoch`."""
        if self._next is not None and self._next.epoch != epoch:
            self._next = None
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch of the next iteration, and the options that rows depend on."""
        names = ("max_tokens", "too_long", "seed", "rows_per_step")
        return {"epoch": self.epoch, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the epoch of the next iteration to a saved one; rows are ordered as those of the saved run.

        Raises:
            ConfigurationError: the saved rows have another `max_tokens` or `too_long`.
        """
        for name in ("max_tokens", "too_long"):
            if state[name] != getattr(self, name):
                raise ConfigurationError(
                    f"the saved stream was packed with {name}={state[name]!r}, and this one with "
                    f"{getattr(self, name)!r}; use {name}={state[name]!r}, or leave the loader out to begin an epoch"
                )
        self.epoch, self.seed, self.rows_per_step = state["epoch"], state["seed"], state["rows_per_step"]
        self._next = None

    def place_of(self, row: int) -> dict[str, Any] | None:
        """Return what `go_to` needs to begin with a row that the last iteration has yielded; None if unknown."""
        begun = [place for place in self._windows if place.row <= row]
        return None if not begun else {**vars(begun[-1]), "passed": row - begun[-1].row}

    def go_to(self, place: dict[str, Any]) -> None:
        """Let the next iteration begin where `place_of` was asked; no document before its window is tokenised."""
        self._next = _Place(**place)

    # ----- one iteration -----

    def _rows(self, place: _Place) -> Iterator[list[Document]]:
        passed = place.passed
        for number, window in enumerate(self._packed(place), place.row // self.window_rows):
            order: Iterable[int] = range(len(window))
            if self.seed is not None:
                costs = [sum(cost_of(len(each["input_ids"]), self.attention_length) for each in row) for row in window]
                sampler = PackedSampler(costs, self.rows_per_step, mixed(self.seed, place.epoch))
                sampler.set_epoch(number)
                order = sampler
            yield from (window[row] for row in islice(order, passed, None))
            passed = max(passed - len(window), 0)

    def _packed(self, place: _Place) -> Iterator[list[list[Document]]]:
        """Yield the windows from `place` on."""
        row = place.row
        window: list[list[Document]] = []
        room = MostRoom(self.max_tokens)
        for document, token, piece, known in self._pieces(place):
            found = room.first_with(len(piece["input_ids"]))
            if not window or found == self.window_rows:
                if window:
                    yield window
                    row += len(window)
                    window, room, found = [], MostRoom(self.max_tokens), 0
                self._windows.append(_Place(place.epoch, row, document, token, known))
            if found == len(window):
                window.append([])
            window[found].append(piece)
            room.take(found, len(piece["input_ids"]))
        if window:
            yield window
        elif place == _Place(place.epoch):
            raise ConfigurationError(
                f"the stream has no token in epoch {place.epoch}; give it documents, and a data set that yields them "
                "again in each epoch, as a generator does not"
            )

    def _pieces(self, place: _Place) -> Iterator[tuple[int, int, Document, tuple[int, Any] | None]]:
        """Yield documents from `place` on: their number, first token, tokens, and a state of the stream before them."""
        number, state = place.known or (0, None)
        chunks = _Chunks(self.dataset, place, number, state)
        work = _Tokenised(self.tokenize)
        loader = DataLoader(work, None, sampler=chunks, collate_fn=_as_is, **self.worker_options)
        for ids, labels, lengths in loader:
            number, known = chunks.sent.popleft()
            end = 0
            for document, length in enumerate(lengths, number):
                start, end = end, end + length
                for first, last in parts_of(document, length, self.max_tokens, self.too_long):
                    if (document, first) < (place.document, place.token):
                        continue
                    part = slice(start + first, start + last)
                    yield document, first, {"input_ids": ids[part], "labels": labels[part]}, known


class _Chunks:
    """Reads a stream in this process, and yields its documents in chunks that a worker tokenises.

    Args:
        dataset: the stream.
        place: where reading begins; earlier documents are read and dropped.
        number, state: a document before `place`, and the state of the stream there; 0 and None for its start.

    Attributes:
        sent: for each chunk that was not taken yet, the number of its first document, and the last state known.
    """

    def __init__(self, dataset: Iterable[Any], place: _Place, number: int, state: Any) -> None:
        self.dataset, self.place, self.number, self.state = dataset, place, number, state
        self.sent: deque[tuple[int, tuple[int, Any] | None]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        number, dataset = self.number, self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.place.epoch)
        if self.state is not None:
            dataset.load_state_dict(self.state)
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            number = self.place.document
            documents = map(dataset.__getitem__, range(number, len(dataset)))
        else:
            documents = iter(dataset)
            number += sum(1 for _ in islice(documents, self.place.document - number))
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        while True:
            known = (number, dataset.state_dict()) if has_state else None
            chunk = list(islice(documents, _CHUNK))
            if not chunk:
                return
            self.sent.append((number, known))
            number += len(chunk)
            yield chunk


class _Tokenised:
    """Runs in a worker: makes the tokens of a chunk of documents, in one tensor, since each takes a file handle."""

    def __init__(self, tokenize: Callable[[Any], Any] | None) -> None:
        self.tokenize = tokenize

    def __getitem__(self, chunk: list[Any]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the ids and labels of all documents, one behind the other, and the length of each."""
        items = [self.tokenize(each) for each in chunk] if self.tokenize else chunk
        ids = [torch.as_tensor(ids_of(item), dtype=torch.long) for item in items]
        if not any(isinstance(item, Mapping) and item.get("labels") is not None for item in items):
            return (joined := torch.cat(ids)), joined, [len(each) for each in ids]
        labels = [labels_of(item, own, "an item of the stream") for item, own in zip(items, ids, strict=True)]
        return torch.cat(ids), torch.cat(labels), [len(each) for each in ids]


def _as_is(chunk: Any) -> Any:
    return chunk
