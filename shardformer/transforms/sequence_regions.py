"""Sequence-parallel regions around the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardformer.sequence_parallel.blocked import BlockedSequence, return_whole_states, use_parameters_by_block
from shardformer.sequence_parallel.split_gather import (
    SequenceParallel,
    slice_other_tokens,
    slice_positions,
    wrap_layers,
)


def divide_layers(
    model: nn.Module, lists: Iterable[list[nn.Module]], region: SequenceParallel, by_exchange: bool
) -> None:
    """Let layers see parts of sequences, which are whole before and after each list of layers.

    Args:
        model: the model.
        lists: layers that run one after the other on this rank.
        region: the parts.
        by_exchange: whether attention exchanges parts for heads, so that layers read the positions of their parts.
    """
    for layers in filter(None, lists):
        if getattr(layers[0], "sees_whole_sequences", False):
            continue
        wrap_layers(layers, region)
        for layer in layers:
            slice_other_tokens(layer, region)
        for layer in layers if by_exchange else ():
            slice_positions(layer, region)
        if isinstance(region, BlockedSequence):
            use_parameters_by_block(layers, region)
    if isinstance(region, BlockedSequence) and not region.is_cut:
        return_whole_states(model, region)
