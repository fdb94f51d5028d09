"""Ids and labels outside of a vocabulary that is cut over ranks: none of them holds the row, and none would miss it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class OutOfVocabularyError(IndexError):
    """An index that no row of a vocabulary belongs to, where torch raises an IndexError as well.

    Args:
        value: the index.
        size: rows of the vocabulary, without padding.
        kind: "token id" or "label".
        entry: of the batch that holds it, and where; empty if that is not known.
    """

    def __init__(self, value: int, size: int, kind: str, entry: str = "") -> None:
        self.value, self.size, self.kind, self.entry = value, size, kind, entry
        where = f" in {entry}" if entry else ""
        ignored = ", or -100 for a label that does not count" if kind == "label" else ""
        super().__init__(f"{kind} {value}{where} is outside of the vocabulary of {size}; use 0 to {size - 1}{ignored}")


def check_indices(indices: Tensor, size: int, kind: str, ignored: int | None = None) -> None:
    """See that `indices` are rows of a vocabulary.

    A GPU is not waited for: there it is an assertion on the device, as it is in torch's own embedding and loss.

    Args:
        indices: [...], the same on all ranks of the axis over which the vocabulary is cut.
        size: rows of the vocabulary, without padding.
        kind: what they are, for the message.
        ignored: an index that stands for none.

    Raises:
        OutOfVocabularyError: one is negative or too large.
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
