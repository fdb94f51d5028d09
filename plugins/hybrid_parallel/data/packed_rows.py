"""Micro-batches of a batch that is one row of packed documents: the row is cut where documents start.

Such a batch cannot be cut along its samples. Its documents do not see each other, so that the parts between them give
the same outputs, and the sums of the losses of the parts are the sum of the row if no label crosses a cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from booster.data.balance import ATTENTION_LENGTH, attention_length_of, cost_of, cuts_of
from plugins.hybrid_parallel.data.microbatch import has_tokens
from shardformer.attention.packed_documents import asks_for_cache, document_starts, may_be_packed
from shardformer.loss.terms import IGNORE_INDEX, SHIFTED, HeadLoss


@dataclass(frozen=True)
class PackedRow:
    """A row of packed documents.

    Attributes:
        borders: where documents start, and the number of tokens of the row.
    """

    borders: tuple[int, ...]

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.borders) - 1

    def cuts(self, parts: int, hidden_size: int | None) -> list[int]:
        """Return [parts + 1] token indices that cut the row between documents into parts of nearly equal cost.

        Args:
            parts: number of parts, at most as many as there are documents.
            hidden_size: of the model, for the cost of attention; None if it is unknown.
        """
        per_token = ATTENTION_LENGTH if hidden_size is None else attention_length_of(hidden_size)
        lengths = [end - start for start, end in itertools.pairwise(self.borders)]
        return [self.borders[index] for index in cuts_of([cost_of(each, per_token) for each in lengths], parts)]


def packed_row(batch: Mapping[str, Any], head_loss: HeadLoss, has_labels: bool = True) -> PackedRow | None:
    """Return the documents of a batch that may be cut between them; None if it has to stay whole.

    Args:
        batch: tensors on the host, if the host is not to wait for the device.
        head_loss: the loss of the model's head.
        has_labels: whether it computes the loss of the batch.
    """
    if not may_be_packed(batch) or asks_for_cache(batch) or not head_loss.per_token:
        return None
    positions = batch["position_ids"]
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    if positions.dim() != 2 or not all(has_tokens(value, positions.shape[1]) for value in tensors):
        return None
    starts = document_starts(positions)[0].nonzero()[:, 0]
    labels = head_loss.token_labels(batch) if has_labels else []
    if any(_crosses(each, batch, starts[1:] - 1) for each in labels):
        return None
    return PackedRow((*starts.tolist(), positions.shape[1]))


def _crosses(labels: Tensor, batch: Mapping[str, Any], lasts: Tensor) -> bool:
    """Return whether a label [1, seq] of a document's last token is the next document's first token.

    Labels that the batch gives for the tokens themselves stay with their tokens.
    """
    given = [batch[name] for name in ("labels", SHIFTED) if isinstance(batch.get(name), Tensor)]
    if any(labels is each for each in given):
        return False
    return bool((labels[0, lasts] != IGNORE_INDEX).any())
