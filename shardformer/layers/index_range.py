"""Range check of ids and labels for a sharded vocabulary: no rank holds an invalid row, so no lookup would fail."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class OutOfVocabularyError(IndexError):
    """Index outside of a vocabulary; a subclass of the IndexError that torch raises in this case.

    Args:
        value: the index.
        size: rows of the vocabulary, without padding.
        kind: "token id" or "label".
        entry: batch entry that holds the index, and position in it; empty if not known.
    """

    def __init__(self, value: int, size: int, kind: str, entry: str = "") -> None:
        self.value, self.size, self.kind, self.entry = value, size, kind, entry
        where = f" in {entry}" if entry else ""
        ignored = ", or -100 for a label that does not count" if kind == "label" else ""
        super().__init__(f"{kind} {value}{where} is outside of the vocabulary of {size}; use 0 to {size - 1}{ignored}")


def check_indices(indices: Tensor, size: int, kind: str, ignored: int | None = None) -> None:
    """Check that `indices` are rows of a vocabulary.

    On a GPU this is an assertion on the device, as in torch's own embedding and loss, so it does not synchronize.

    Args:
        indices: [...], the same on all ranks of the axis over which the vocabulary is sharded.
        size: rows of the vocabulary, without padding.
        kind: what the indices are, for the message.
        ignored: an index value that is always allowed, such as -100.

    Raises:
        OutOfVocabularyError: an index is negative or too large.
    """
    if indices.is_meta or isinstance(indices, FakeTensor):
        return
    outside = (indices < 0) | (indices >= size)
    if ignored is not None:
        outside &= indices != ignored
    if indices.device.type == "cpu" and not torch.compiler.is_compiling():
        if outside.any():
            raise OutOfVocabularyError(int(indices[outside][0]), size, kind)
    elif indices.device.type in ("cpu", "cuda"):
        torch._assert_async(~outside.any(), f"a {kind} is outside of the vocabulary of {size}")
