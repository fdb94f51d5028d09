"""Error context for indices outside the vocabulary: the entry of the batch that holds the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardformer.layers.index_range import OutOfVocabularyError


@contextmanager
def naming_entry(batch: Mapping[str, Any]) -> Iterator[None]:
    """Add the batch entry and position to an out-of-vocabulary error raised by a pass over `batch`.

    Raises:
        OutOfVocabularyError: the original error, with its position in the batch.
    """
    try:
        yield
    except OutOfVocabularyError as error:
        entry = _entry_with(error, batch)
        if error.entry or entry is None:
            raise
        raise OutOfVocabularyError(error.value, error.size, error.kind, entry) from None


def _entry_with(error: OutOfVocabularyError, batch: Mapping[str, Any]) -> str | None:
    """Return the entry and position that hold the index.

    Labels are searched first for a label error and last otherwise, because decoder inputs may be made of labels.
    """
    names = sorted(batch, key=lambda name: ("label" in name) != (error.kind == "label"))
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
            places = (value == error.value).nonzero()
            if len(places):
                return f"{name}{places[0].tolist()}"
    return None
