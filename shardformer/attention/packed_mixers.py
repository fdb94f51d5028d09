"""Packed documents in token mixers: a mixer runs over documents that lie in rows of their own.

Its recurrence and its convolution would carry a document into the next one of the row. Documents of similar length
become the rows of one call, which end with padding: a causal mixer does not let it reach the tokens in front of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shardformer.attention.packed_documents import document_starts
from shardformer.sequence_parallel.split_gather import first_output
from shardformer.utils.derived_modules import derive, replace_modules

TOKENS = "hidden_states"  # what a mixer calls [batch, seq, hidden]


def token_mixers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of these layers that mix tokens by a convolution of their own, and read `hidden_states`."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    convolve = [each for each in modules if any(isinstance(child, nn.Conv1d) for child in each.children())]
    return [each for each in convolve if TOKENS in inspect.signature(each.forward).parameters]


Lengths = tuple[tuple[int, ...], ...]  # of the documents in each row

ARGUMENT = "document_lengths"  # of the model's forward, which hands it on to its layers
_MASK = "attention_mask"
# Borders that a mixer's kernel would look for in the row that it does not get.
_BORDERS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def document_lengths(positions: Tensor, rows: int) -> Lengths:
    """Return the lengths of the documents in `rows` rows of positions, [rows or 1, seq]."""
    found = tuple(map(_lengths_between, document_starts(positions)))
    return found if len(found) == rows else found * rows


def _lengths_between(starts: Tensor) -> tuple[int, ...]:
    places = [*starts.nonzero()[:, 0].tolist(), len(starts)]
    return tuple(end - start for start, end in pairwise(places))


class Documents:
    """The documents in the rows that the layer which runs now reads. Copies of a model share it.

    Attributes:
        lengths: of these; None if nothing is packed.
    """

    lengths: Lengths | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Documents:
        return self


class LayerOfDocuments(nn.Module):
    """Methods of a layer that is told of `document_lengths`, also when it is recomputed: hooks would stay outside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward."""
        self.documents.lengths = kwargs.pop(ARGUMENT, None)
        return super().forward(*args, **kwargs)


class MixerOfDocuments(nn.Module):
    """Methods of a token mixer that runs over documents; what its hooks gather, such as whole sequences, is theirs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward over rows that are documents."""
        native = super().forward
        if self.documents.lengths is None:
            return native(*args, **kwargs)
        given = signature(native).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        rest = {name: value for name, value in given.items() if name not in (TOKENS, *_BORDERS)}
        if _MASK in rest:
            rest[_MASK] = None  # of rows without padding: a tensor, though it hides nothing, where the model is traced
        return _run_by_document(
            lambda hidden: native(**{TOKENS: hidden}, **rest), given[TOKENS], self.documents.lengths
        )


def keep_documents_apart(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Let the mixers in layers of `model` run over one document a row, where it is told of `document_lengths`."""
    layers, documents = list(layers), Documents()
    changes: dict[nn.Module, nn.Module] = {}
    for modules, methods in ((layers, LayerOfDocuments), (token_mixers(layers), MixerOfDocuments)):
        for module in modules:
            module.documents = documents
            changes[module] = derive(module, methods)
    replace_modules(model, changes)
    model.mixers_run_by_document = True


def _run_by_document(run: Callable[[Tensor], Any], hidden: Tensor, lengths: Lengths) -> Any:
    """Run over documents as rows; return the hidden states of all in their places, [rows, seq, hidden].

    Rows may end with the padding of context parallelism, which stays as it is.
    """
    sizes = [(*own, hidden.shape[1] - sum(own)) for own in lengths]
    parts = [part for row, own in zip(hidden, sizes, strict=True) for part in row.split(own)]
    groups: dict[int, list[int]] = {}
    for number in sorted({*range(len(parts))} - _ends(sizes)):
        groups.setdefault(len(parts[number]).bit_length(), []).append(number)  # at most half of a call is padding
    output: Any = None
    for numbers in groups.values():
        output = run(pad_sequence([parts[number] for number in numbers], batch_first=True))
        states = output[0] if isinstance(output, tuple | list) else output
        for number, state in zip(numbers, states, strict=True):
            parts[number] = state[: len(parts[number])]
    return first_output(output, lambda _: torch.cat(parts).view_as(hidden))


def _ends(sizes: list[tuple[int, ...]]) -> set[int]:
    """Return the numbers of the parts that end the rows."""
    return {end - 1 for end in accumulate(map(len, sizes))}
