"""What a family of the zoo is: a small awkward configuration, its head classes, and ragged batches for them.

The sizes are meant to be awkward: a vocabulary that nothing divides, layers that no number of stages divides, key and
value heads fewer than ranks, intermediate sizes that leave uneven parts. The batches are, too: left and right padding
side by side, other content in every sample, other counts of ignored labels, other lengths at every step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB_SIZE = 1021  # a prime
NUM_CLASSES = 5
PAD_TOKEN = 0
LENGTHS = (13, 10, 17, 7)  # of the sequences at step 0, 1, 2, ...

Batch = dict[str, Tensor]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")  # as configurations name the number of layers
_TWO_STACKS = (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers"))


@dataclass(frozen=True)
class Head:
    """One head class of a family.

    Attributes:
        model_class: name in transformers.
        labels: (batch without labels, generator) -> the labels.
        config: what this head needs beside the family's configuration.
        criterion: the user's loss that it is trained with; None for the head's own.
        reference_loss: (outputs, labels) -> the head's loss where transformers computes it in fp32 whatever the
            model's dtype, so that it is no reference for fp64. Also checked against transformers' own.
        num_choices: sequences a sample, for multiple choice; 0 for the usual [batch, seq].
        layout: the layout that it is trained on beside the family's first head; None for the usual ones.
        samples_are_coupled: its numbers depend on which samples are together: the batch is not cut.
        native_labels: batch -> its labels as transformers takes them, where the library also takes another form.
    """

    model_class: str
    labels: Callable[[Batch, torch.Generator], Batch]
    config: Mapping[str, Any] = field(default_factory=dict)
    criterion: Callable[[Any, Mapping[str, Any]], Any] | None = None
    reference_loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None
    num_choices: int = 0
    layout: str | None = None
    samples_are_coupled: bool = False
    native_labels: Callable[[Batch], Batch] | None = None


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        config_class: name in transformers.
        config: the small awkward configuration, dropout 0.
        heads: name in tests -> head; the first is the one that is trained on every layout.
        token_types: whether its batches have `token_type_ids`.
        inputs: (rows, step, generator) -> a batch without labels; None for ragged tokens.
        attention_dropout: name in the configuration of the dropout of attention probabilities; None where there is
            none.
        attention_output: end of the path of the projection behind the attention.
        attention_by_hand: whether its attention does not go through transformers' registry.
        precision: what it is compared in; "fp32" where transformers itself rounds to it, or has no fp64 kernel.
        sequence_parallel: whether its policy knows split-gather.
        module: where its classes are.
    """

    config_class: str
    config: Mapping[str, Any]
    heads: Mapping[str, Head]
    token_types: bool = False
    inputs: Callable[[int, int, torch.Generator], Batch] | None = None
    attention_dropout: str | None = None
    attention_output: str = ""
    attention_by_hand: bool = False
    precision: str = "fp64"
    sequence_parallel: bool = True
    module: str = "transformers"

    @property
    def main_head(self) -> str:
        return next(iter(self.heads))

    def shallow(self, head: str, stages: int) -> dict[str, int]:
        """Configuration values for as few layers as that many stages share unevenly; none where depths are special."""
        own = self.heads[head].config
        if "out_indices" in {**self.config, **own}:  # of layers
            return {}
        for name in _LAYERS:
            if self.config.get(name) == 5 and name not in own:
                return {name: stages + 1}
        for encoder, decoder in _TWO_STACKS:
            if encoder in self.config and decoder in self.config and stages < 4:
                # A head of the decoder alone counts its layers by the name of the encoder's.
                return {encoder: stages + 1 if encoder in own else 2, decoder: stages + 1}
        return {}

    def build(self, head: str, dtype: torch.dtype = torch.float64, **config: Any) -> nn.Module:
        """A model with weights that depend on nothing but the arguments, in training mode."""
        chosen, library = self.heads[head], importlib.import_module(self.module)
        values = {**self.config, **chosen.config, **config}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            model = getattr(library, chosen.model_class)(getattr(library, self.config_class)(**values))
            with torch.no_grad():
                # Biases start at 0 and norms at 1: noise lets mistakes in them show. What a model freezes it computes.
                for param in model.parameters():
                    if param.requires_grad:
                        param.add_(torch.randn_like(param), alpha=0.05)
        return model.to(dtype).train()

    def batch(self, head: str, step: int, rows: int, dtype: torch.dtype = torch.float64) -> Batch:
        """The global batch of one step; floating-point labels get `dtype`."""
        chosen = self.heads[head]
        generator = torch.Generator().manual_seed(1000 + step)
        if self.inputs is not None:
            batch = self.inputs(rows, step, generator)
        else:
            shape = (rows, chosen.num_choices) if chosen.num_choices else (rows,)
            batch = ragged_tokens(shape, LENGTHS[step % len(LENGTHS)], generator)
        if self.token_types:
            batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape, generator=generator)
        batch |= chosen.labels(batch, generator)
        return {key: value.to(dtype) if _is_floating_point(value) else value for key, value in batch.items()}


def _is_floating_point(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def num_rows(batch: Batch) -> int:
    """Samples of a batch."""
    return len(next(iter(batch.values())))


def ragged_tokens(shape: tuple[int, ...], length: int, generator: torch.Generator) -> Batch:
    """[*shape, length] tokens; every other sequence is padded on the left, the others on the right."""
    tokens = torch.randint(PAD_TOKEN + 1, VOCAB_SIZE, (*shape, length), generator=generator).flatten(0, -2)
    kept = torch.randint(length // 2, length + 1, (len(tokens),), generator=generator)
    kept[0] = length
    position = torch.arange(length)
    mask = torch.stack(
        [position >= length - count if row % 2 else position < count for row, count in enumerate(kept.tolist())]
    ).long()
    tokens = tokens.masked_fill(mask == 0, PAD_TOKEN)
    return {"input_ids": tokens.view(*shape, length), "attention_mask": mask.view(*shape, length)}
