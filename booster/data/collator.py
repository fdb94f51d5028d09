"""Collator of packed rows: batches of one row without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
