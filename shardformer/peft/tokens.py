"""Rows of an embedding that peft trains by themselves (`trainable_token_indices`), where ranks hold parts of it.

peft puts the trained rows into a copy of the weight and looks tokens up there. A rank that has a part of the weight
looks them up over all ranks first, and then puts the trained rows into the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def look_up_trained_rows(adapter: nn.Module) -> None:
    """Let a `TrainableTokensLayer`, whose base layer is a sharded embedding, replace rows of the output."""
    adapter.forward_adapters = partial(_forward, adapter)
    adapter.get_merged_weights = partial(_weight, adapter)


def _forward(adapter: nn.Module, ids: Tensor, active: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    """Look up [batch, seq] -> [batch, seq, hidden]."""
    out = adapter.base_layer(ids, *args, **kwargs)
    if adapter.disable_adapters or not active:
        return out
    adapter._check_overlapping_tokens(active)
    for name in active:
        tokens = adapter.token_indices[name]
        is_token = ids.unsqueeze(-1) == torch.tensor(tokens, device=ids.device)  # [batch, seq, trained rows]
        # The padding row gets no gradient, as natively.
        padding = adapter.base_layer.padding_idx
        row = tokens.index(padding) if padding in tokens else None
        rows = F.embedding(is_token.int().argmax(-1), adapter.trainable_tokens_delta[name].to(out.dtype), row)
        out = torch.where(is_token.any(-1, keepdim=True), rows, out)
    return out


def _weight(adapter: nn.Module, active: Sequence[str]) -> Tensor:
    """Return this rank's rows, of which models read only the dtype and the device."""
    return adapter.base_layer.weight
