"""Outputs of a model whose routers see parts of sequences, on one stage."""

from __future__ import annotations

from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.output_parts import AUX_LOSS
from plugins.hybrid_parallel.data.microbatch import stand_in, without_rows
from shardformer.loss.routers import ASKED


def forward_with_aux_loss(model: Any, args: tuple, inputs: dict[str, Any]) -> Any:
    """Run a pass without labels; its auxiliary loss is that of the whole sequences of the replica.

    Args:
        model: the boosted model.
        args, inputs: of the wrapped model's forward.

    Raises:
        ConfigurationError: if the family's auxiliary loss cannot be computed from sums over parts.
    """
    has_rows = bool(args) or not model.options.is_empty(inputs)
    balance = model.losses.balance_without_labels([inputs] if has_rows else [])
    if balance is None:
        raise ConfigurationError(
            "output_router_logits=True adds outputs.aux_loss of whole sequences, of which each rank has a part; use "
            "output_router_logits=False, or cp_size=1 and sequence_parallelism_mode='split_gather'"
        )
    given = inputs if has_rows else stand_in(inputs, model.options.media_tokens)
    with balance.watching(0, 0):
        outputs = model.module(*args, **{**given, ASKED: False})
    outputs = model.whole_sequences(outputs)
    outputs = type(outputs)(**{**outputs, AUX_LOSS: balance.loss_of_replica()})
    return outputs if has_rows else without_rows(outputs)
