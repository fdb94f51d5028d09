"""Sequence-parallel regions around the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from shardformer.sequence_parallel.blocked import BlockedSequence, return_whole_states, use_parameters_by_block
from shardformer.sequence_parallel.split_gather import (
    SequenceParallel,
    count_whole_sequences,
    first_input,
    first_output,
    slice_other_tokens,
    slice_positions,
    wrap_layers,
)
from shardformer.stages.placeholders import LayerInputs
from shardformer.utils.module_paths import by_layer
from shardformer.utils.untraced import call_through


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
        count_whole_sequences(model, layers if by_exchange else (), region.positions_of_part)
        if isinstance(region, BlockedSequence):
            use_parameters_by_block(layers, region)
    if isinstance(region, BlockedSequence) and not region.is_cut:
        return_whole_states(model, region)


def leave_between_layers(
    runner: nn.Module,
    names: Collection[str],
    layers: Iterable[nn.Module],
    held: Iterable[list[nn.Module]],
    region: SequenceParallel,
) -> None:
    """Let sequences be whole where `runner`, the module around the layers, adds features of a layer to their states.

    Args:
        runner: the module that calls the layers.
        names: inputs of `runner` with features for some layers; it adds them in front of a layer or behind it.
        layers: the list of layers.
        held: layers that run one after the other on this rank.
        region: the parts of sequences that layers have.
    """
    inputs, gaps = LayerInputs(runner), _Gaps(region)
    numbers = {layer: number for number, layer in enumerate(layers)}

    def begin(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        gaps.begin({number for name in names for number in by_layer(inputs.get(name, args, kwargs))})

    runner.register_forward_pre_hook(begin, with_kwargs=True)
    for chain in held:
        for layer in chain:
            # Outside of hooks, which run again where layers are recomputed, then perhaps after another pass has begun.
            call_through(
                layer, gaps.around(numbers[layer], enters=layer is not chain[0], leaves=layer is not chain[-1])
            )


class _Gaps:
    """Places between the layers of a region where sequences are whole in the pass that runs."""

    def __init__(self, region: SequenceParallel) -> None:
        self.region, self.is_whole = region, False
        self.numbers: Collection[int] = ()

    def begin(self, numbers: Collection[int]) -> None:
        """Begin a pass with features for the layers of these numbers."""
        self.numbers, self.is_whole = numbers, False

    def around(self, number: int, enters: bool, leaves: bool) -> Callable[..., Any]:
        """Return the outer call of a layer; the region itself is entered at its first and left at its last layer."""

        def outer(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            if enters and self.is_whole:
                args, kwargs = first_input(args, kwargs, self.region.enter)
                self.is_whole = False
            output = call(*args, **kwargs)
            if leaves and not {number, number + 1}.isdisjoint(self.numbers):
                output = first_output(output, self.region.leave)
                self.is_whole = True
            return output

        return outer
