"""The loss of each kind of head, as sums and counts.

transformers computes a mean inside `forward`. A mean over one micro-batch on one rank says nothing about the global
mean when counts differ (ignored labels, a short last batch), so here a loss is a sum and a count: counts depend on
the labels alone, are known before the forward pass, and are added up over micro-batches and data-parallel ranks. The
sums read vocabulary-parallel logits where they lie. Definitions follow transformers' `loss/loss_utils.py` and, for
BERT's older heads, their `forward`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.cross_entropy import cross_entropy_sum
from shardformer.layers.head import VocabParallelLMHead

Batch = Mapping[str, Any]
IGNORE_INDEX = -100


@dataclass(frozen=True)
class LossTerm:
    """One mean in a head's loss.

    Attributes:
        labels: the key of the batch that holds the labels.
        count: (labels, batch) -> how many values the mean is over (0-d).
        total: (outputs, labels) -> sum of the values (0-d, differentiable).
        weight: factor of this mean in the loss.
        is_input: whether the model's forward reads the labels, too.
        epsilon: added to the global count.
        prepare: (labels, batch) -> the labels as `count` and `total` take them; None for as they are.
    """

    labels: str
    count: Callable[[Tensor, Batch], Tensor]
    total: Callable[[Any, Tensor], Tensor]
    weight: float = 1.0
    is_input: bool = False
    epsilon: float = 0.0
    prepare: Callable[[Tensor, Batch], Tensor] | None = None

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of a batch, as `count` and `total` take them."""
        labels = batch[self.labels]
        return labels if self.prepare is None else self.prepare(labels, batch)


class HeadLoss:
    """The loss that a head computes when labels are given: the weighted sum of a few means.

    Args:
        terms: the means; all of their labels have to be there, as in transformers.
        decoder_inputs: labels -> what an encoder-decoder reads where it is given labels alone.

    Attributes:
        couples_samples: whether a sample's loss depends on the other samples of its batch, which then cannot be cut.
    """

    couples_samples = False

    def __init__(self, *terms: LossTerm, decoder_inputs: Callable[[Tensor], Tensor] | None = None) -> None:
        self.terms, self.decoder_inputs = terms, decoder_inputs

    @property
    def label_keys(self) -> tuple[str, ...]:
        """The labels that the model's forward does without."""
        return tuple(term.labels for term in self.terms if not term.is_input)

    def applies_to(self, batch: Batch) -> bool:
        """Whether the batch has all the labels; without them transformers returns no loss."""
        return all(batch.get(term.labels) is not None for term in self.terms)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """What the model is given: the batch without labels, and what it would have made of them."""
        inputs = {key: value for key, value in batch.items() if key not in self.label_keys}
        given = any(inputs.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
        if self.decoder_inputs is not None and not given and batch.get("labels") is not None:
            inputs["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        return inputs

    def counts(self, batch: Batch) -> Tensor:
        """[terms], float64: how many values each mean is over in this batch."""
        return torch.stack([term.count(term.labels_of(batch), batch).double() for term in self.terms])

    def weighted_sum(self, outputs: Any, batch: Batch, global_counts: Tensor) -> Tensor:
        """This batch's share of the global loss: sum of weight * total / global count (0-d)."""
        weights, epsilons = torch.tensor([(term.weight, term.epsilon) for term in self.terms]).to(global_counts).T
        factors = weights / (global_counts + epsilons).clamp(min=1.0)
        totals = torch.stack([term.total(outputs, term.labels_of(batch)) for term in self.terms])
        return (totals * factors.to(totals.dtype)).sum()


def head_loss_of(model: nn.Module) -> HeadLoss | None:
    """The loss of the model's head by its class name, or None for a head (or a bare model) that has none."""
    name = type(model).__name__
    if name in _NOT_SHIFTED:
        return _masked_lm(model)
    for suffix, build in _BY_SUFFIX.items():
        if name.endswith(suffix):
            return build(model)
    return None


def _not_ignored(labels: Tensor, _: Batch) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def _tokens(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of [..., classes] logits, cut over the vocabulary where the head left them so."""
    flat = logits.reshape(-1, logits.shape[-1])
    head = next((m for m in model.modules() if isinstance(m, VocabParallelLMHead)), None)
    if head is None or head.gather_output:
        return cross_entropy_sum(flat, labels.reshape(-1))
    return cross_entropy_sum(flat, labels.reshape(-1), head.vocab_range, head.group)


def _causal_lm(model: nn.Module) -> HeadLoss:
    def total(outputs: Any, labels: Tensor) -> Tensor:
        # Token t predicts label t + 1. The labels move, not the logits: no copy of [batch, seq, vocabulary].
        return _tokens(model, outputs.logits, F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:])

    return HeadLoss(LossTerm("labels", lambda labels, batch: _not_ignored(labels[..., 1:], batch), total))


def _masked_lm(model: nn.Module) -> HeadLoss:
    return HeadLoss(LossTerm("labels", _not_ignored, lambda outputs, labels: _tokens(model, outputs.logits, labels)))


def _conditional_generation(model: nn.Module) -> HeadLoss:
    if not model.config.is_encoder_decoder:
        return _causal_lm(model)
    return HeadLoss(*_masked_lm(model).terms, decoder_inputs=_shift_right(model))


def _shift_right(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """How the family makes decoder inputs of labels: a method, or a function beside the class."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels
    family, config = sys.modules[type(model).__module__], model.config
    tokens = (config.pad_token_id, config.decoder_start_token_id)
    takes = len(inspect.signature(family.shift_tokens_right).parameters) - 1
    return lambda labels: family.shift_tokens_right(labels, *tokens[:takes])


def _pretraining(model: nn.Module) -> HeadLoss:
    return HeadLoss(
        LossTerm("labels", _not_ignored, lambda outputs, labels: _tokens(model, outputs.prediction_logits, labels)),
        LossTerm(
            "next_sentence_label",
            _not_ignored,
            lambda outputs, labels: cross_entropy_sum(outputs.seq_relationship_logits.view(-1, 2), labels.view(-1)),
        ),
    )


def _plain_classes(_: nn.Module) -> HeadLoss:
    def total(outputs: Any, labels: Tensor) -> Tensor:
        return cross_entropy_sum(outputs.logits.reshape(-1, outputs.logits.shape[-1]), labels.reshape(-1))

    return HeadLoss(LossTerm("labels", _not_ignored, total))


def _sequence_classification(model: nn.Module) -> HeadLoss:
    config = model.config

    def problem(labels: Tensor) -> str:
        if config.problem_type is not None:
            return config.problem_type
        if config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def count(labels: Tensor, batch: Batch) -> Tensor:
        if problem(labels) == "single_label_classification":
            return _not_ignored(labels, batch)
        return torch.tensor(labels.numel(), device=labels.device)

    def total(outputs: Any, labels: Tensor) -> Tensor:
        logits, kind = outputs.logits, problem(labels)
        if kind == "single_label_classification":
            return cross_entropy_sum(logits.view(-1, config.num_labels), labels.view(-1))
        pointwise = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
        return pointwise(logits.reshape(-1), labels.reshape(-1).to(logits.dtype), reduction="sum")

    return HeadLoss(LossTerm("labels", count, total))


def _question_answering(_: nn.Module) -> HeadLoss:
    def term(end: str) -> LossTerm:
        def count(positions: Tensor, batch: Batch) -> Tensor:
            tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
            return (positions < tokens.shape[1]).sum()

        def total(outputs: Any, positions: Tensor) -> Tensor:
            logits = outputs[f"{end}_logits"]  # [batch, seq]
            length = logits.shape[1]
            # A position behind the end of the (padded) sequence means that the answer was cut off: no loss.
            return cross_entropy_sum(logits, positions.reshape(-1).clamp(0, length), ignore_index=length)

        return LossTerm(f"{end}_positions", count, total, weight=0.5)

    return HeadLoss(term("start"), term("end"))


def _masked_pixels(model: nn.Module) -> HeadLoss:
    config = model.config
    epsilon = 1e-5  # transformers divides by the masked pixels and this

    def count(masked: Tensor, _: Batch) -> Tensor:
        return masked.sum() * config.patch_size**2

    def total(outputs: Any, masked: Tensor) -> Tensor:
        # The reconstructed pixels have been compared by the model, whose mean becomes a sum again.
        return outputs.loss * (count(masked, {}) + epsilon)

    return HeadLoss(LossTerm("bool_masked_pos", count, total, is_input=True, epsilon=epsilon))


def _masked_visual_tokens(model: nn.Module) -> HeadLoss:
    def of_patches(labels: Tensor, batch: Batch) -> Tensor:
        """[rows, patches], also from transformers' list of the masked patches of all samples."""
        if labels.dim() == 2:
            return labels
        masked = batch["bool_masked_pos"].bool()  # [rows, patches]
        if labels.numel() != int(masked.sum()):
            raise ValueError(
                f"labels is a list of {labels.numel()} masked patches where a micro-batch has {int(masked.sum())}; "
                f"a list cannot be cut into micro-batches: give labels of shape [rows, patches], {IGNORE_INDEX} where "
                "nothing is masked, or use num_microbatches=1"
            )
        return labels.new_full(masked.shape, IGNORE_INDEX).masked_scatter(masked, labels)

    def total(outputs: Any, labels: Tensor) -> Tensor:
        return _tokens(model, outputs.logits, labels)

    return HeadLoss(LossTerm("labels", _not_ignored, total, prepare=of_patches))


def _segmentation(model: nn.Module) -> HeadLoss:
    def count(labels: Tensor, _: Batch) -> Tensor:
        return (labels != model.config.semantic_loss_ignore_index).sum()

    def total(outputs: Any, labels: Tensor) -> Tensor:
        # The logits of the auxiliary head are not among the outputs: the model's mean becomes a sum again.
        pixels = int(count(labels, {}))
        return outputs.loss * pixels if pixels else outputs.logits.sum() * 0.0

    return HeadLoss(LossTerm("labels", count, total, is_input=True))


class ContrastiveLoss(HeadLoss):
    """CLIP's: each text finds its image among those of the batch, and each image its text."""

    couples_samples = True

    def __init__(self) -> None:
        def total(outputs: Any, _: Any) -> Tensor:
            logits = outputs.logits_per_text  # [texts, images]
            pairs = torch.arange(len(logits), device=logits.device)
            return (cross_entropy_sum(logits, pairs) + cross_entropy_sum(logits.t(), pairs)) / 2

        super().__init__(LossTerm("return_loss", lambda _, batch: torch.tensor(len(batch["input_ids"])), total))

    def applies_to(self, batch: Batch) -> bool:
        """Whether the loss is asked for; there are no labels."""
        return bool(batch.get("return_loss"))


# Decoders of these encoder-decoders take labels that are already those of the next token.
_NOT_SHIFTED = frozenset(
    f"{family}ForCausalLM"
    for family in ("Bart", "MBart", "PLBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "Marian", "Whisper")
)

# The first suffix that fits the class name counts.
_BY_SUFFIX: dict[str, Callable[[nn.Module], HeadLoss]] = {
    "ForCausalLM": _causal_lm,
    "LMHeadModel": _causal_lm,
    "DoubleHeadsModel": _causal_lm,
    "ForMaskedLM": _masked_lm,
    "MTModel": _conditional_generation,
    "ForConditionalGeneration": _conditional_generation,
    "ForPreTraining": _pretraining,
    "ForNextSentencePrediction": _plain_classes,
    "ForTokenClassification": _plain_classes,
    "ForMultipleChoice": _plain_classes,
    "ForAudioClassification": _plain_classes,
    "ForSequenceClassification": _sequence_classification,
    "ForImageClassification": _sequence_classification,
    "BeitForMaskedImageModeling": _masked_visual_tokens,
    "ForMaskedImageModeling": _masked_pixels,
    "ForSemanticSegmentation": _segmentation,
    "ForQuestionAnswering": _question_answering,
    "CLIPModel": lambda _: ContrastiveLoss(),
}
