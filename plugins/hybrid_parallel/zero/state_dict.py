"""State dicts of a boosted optimizer, which hold a rank's pieces, and of a plain one, which hold whole states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket_layout import HoldsPieces
from plugins.hybrid_parallel.zero.grouping import place_states
from plugins.hybrid_parallel.zero.whole_parameters import WholeParameters

_PIECES = "pieces"  # marks a state dict of pieces, and describes them


def state_dict_of_pieces(optim: torch.optim.Optimizer, buckets: Sequence[HoldsPieces]) -> dict[str, Any]:
    """Return the state dict of an optimizer over pieces, with a description of the pieces."""
    return {**optim.state_dict(), _PIECES: _describe(buckets)}


def load_state_dict(
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    buckets: Sequence[HoldsPieces],
    order: Sequence[Sequence[nn.Parameter | None]],
    wholes: WholeParameters,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Load a state dict of the same pieces, or of the optimizer before `boost`.

    Args:
        order: the local parameters as the optimizer held them before, by group; None for parameters of other stages.
        wholes: those that the optimizer reads whole.

    Returns:
        The states of parameters that have no bucket.

    Raises:
        ConfigurationError: if the state dict is for another rank's pieces or for other groups.
    """
    if _PIECES in state_dict:
        if state_dict[_PIECES] != _describe(buckets):
            raise ConfigurationError(
                "optimizer.load_state_dict() got the state of another rank or layout; save and load by "
                "booster.save_optimizer(optimizer, directory) and booster.load_optimizer"
            )
        optim.load_state_dict({key: value for key, value in state_dict.items() if key != _PIECES})
        return {}
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group) for group in order]:
        raise ConfigurationError(
            f"optimizer.load_state_dict() got groups of {[len(group['params']) for group in saved]} parameters, the "
            f"optimizer has {[len(group) for group in order]}; make it with the same groups"
        )
    states = {
        param: dict(state_dict["state"][index])
        for group, params in zip(saved, order, strict=True)
        for index, param in zip(group["params"], params, strict=True)
        if param is not None and index in state_dict["state"]
    }
    for group, theirs in zip(optim.param_groups, saved, strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    optim.state.clear()
    wholes.take_states(states)
    place_states(optim, states, buckets)
    return states


def _describe(buckets: Sequence[HoldsPieces]) -> list[list[int]]:
    return [
        [bucket.group_index, piece.index, piece.start, piece.stop, *bucket.params[piece.index].shape]
        for bucket in buckets
        for piece in bucket.pieces
    ]
