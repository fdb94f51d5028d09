"""Which entry of a batch holds an index that is outside of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardformer.layers.index_range import OutOfVocabularyError


@contextmanager
def naming_entry(batch: Mapping[str, Any]) -> Iterator[None]:
    """Around a pass over `batch`: an index that is refused is told with its entry and sample.

    Raises:
        OutOfVocabularyError: the same, with the place.
    """
    try:
        yield
    except OutOfVocabularyError as error:
        entry = _entry_with(error, batch)
        if error.entry or entry is None:
            raise
        raise OutOfVocabularyError(error.value, error.size, error.kind, entry) from None


def _entry_with(error: OutOfVocabularyError, batch: Mapping[str, Any]) -> str | None:
    """Labels first where it is a label; decoder inputs may be made of them."""
    names = sorted(batch, key=lambda name: ("label" in name) != (error.kind == "label"))
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
            places = (value == error.value).nonzero()
            if len(places):
                return f"{name}{places[0].tolist()}"
    return None
