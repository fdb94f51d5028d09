"""Inputs of the module around the layers that it reads between them, such as features of images for its first layers.

Modules of the first stage make them (DeepStack, arXiv 2406.04334: the features of a tower's layers are added to the
hidden states behind the first layers of text). They travel with the hidden state, and their gradients back. Features
that are [tokens, hidden] travel as [batch, seq, hidden]: the number of tokens may change from batch to batch, and the
shapes of a message may not. A stage receives those of its own and of later layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardformer.stages.placeholders import LayerInputs, StageInput
from shardformer.stages.shared_states import Key
from shardformer.utils.token_features import by_layer, mask_among, spread


class FeaturesByLayer(dict[int, Tensor]):
    """Received features: number of a layer -> tensor. It is read like a list, too: earlier layers have 0-d zeros."""

    def __len__(self) -> int:
        """Return the length of a list that ends with the last entry."""
        return max(self, default=-1) + 1

    def __missing__(self, number: int) -> Tensor:
        """Return zero (0-d), which adds nothing to hidden states that earlier stages have left behind."""
        return next(iter(self.values())).new_zeros(())


def keys_between(names: Collection[str], layers: range) -> list[Key]:
    """Return the names of all tensors that a stage may receive, in the order of a message.

    Args:
        layers: numbers of the layers of this stage and of later ones.
    """
    return [(name, "") for name in names] + [(name, str(number)) for number in layers for name in names]


def exchange_inputs(runner: nn.Module, names: Sequence[str], stage_input: StageInput) -> None:
    """Let `runner`, the module around the layers, keep its inputs `names` on the first stage and read them on others.

    Those that are neither tensors nor lists or dictionaries with a tensor for each layer are the same on every stage.
    """
    inputs = LayerInputs(runner)

    def exchange(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if stage_input.hidden is None:
            given = {name: value for name in names if (value := inputs.get(name, args, kwargs)) is not None}
            stage_input.kept.update(_tensors_of(given))
        else:
            for name, value in _received(names, stage_input.kept).items():
                args, kwargs = inputs.put(name, value, args, kwargs)
        return args, kwargs

    runner.register_forward_pre_hook(exchange, with_kwargs=True)


def _tensors_of(given: Mapping[str, Any]) -> dict[Key, Tensor]:
    mask = mask_among(given.values())
    found: dict[Key, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            found[name, ""] = value
        for number, features in by_layer(value).items():
            is_packed = mask is not None and features.dim() == 2
            found[name, str(number)] = spread(features, mask) if is_packed else features
    return found


def _received(names: Sequence[str], kept: Mapping[Key, Tensor | None]) -> dict[str, Any]:
    # Copies: models may change an input in place, and later stages get it as it was.
    found: dict[str, Any] = {name: each.clone() for name in names if (each := kept.get((name, ""))) is not None}
    mask = mask_among(found.values())
    for name in names:
        tensors = {
            int(number): each for (of, number), each in kept.items() if of == name and number and each is not None
        }
        is_packed = mask is not None and all(each.shape[:-1] == mask.shape for each in tensors.values())
        if tensors:
            found[name] = FeaturesByLayer(
                {at: each[mask] if is_packed else each.clone() for at, each in tensors.items()}
            )
    return found
