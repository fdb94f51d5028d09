"""Which loss a head computes, by the name of its class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from shardformer.losses.image import ContrastiveLoss, masked_pixels, masked_visual_tokens, segmentation
from shardformer.losses.sound import connectionist, mean_of_samples
from shardformer.losses.terms import HeadLoss, LossTerm
from shardformer.losses.text import (
    causal_lm,
    conditional_generation,
    language_of_images,
    masked_lm,
    plain_classes,
    pretraining,
    question_answering,
    recurring_spans,
    replaced_tokens,
    sequence_classification,
)

__all__ = ["HeadLoss", "LossTerm", "head_loss_of"]


def head_loss_of(model: nn.Module) -> HeadLoss | None:
    """The loss of the model's head by its class name, or None for a head (or a bare model) that has none."""
    name = type(model).__name__
    if name in _BY_NAME:
        return _BY_NAME[name](model)
    for suffix, build in _BY_SUFFIX.items():
        if name.endswith(suffix):
            return build(model)
    return None


# Decoders of these encoder-decoders take labels that are already those of the next token.
_NOT_SHIFTED = (
    "Bart",
    "BigBirdPegasus",
    "Blenderbot",
    "BlenderbotSmall",
    "Marian",
    "MBart",
    "Mvp",
    "Pegasus",
    "PLBart",
    "Whisper",
)

# Heads whose loss is not that of others with their suffix.
_BY_NAME: dict[str, Callable[[nn.Module], HeadLoss | None]] = {
    **{f"{family}ForCausalLM": masked_lm for family in _NOT_SHIFTED},
    **{f"Blip2{head}": language_of_images for head in ("ForConditionalGeneration", "Model")},
    "BertGenerationDecoder": causal_lm,
    **dict.fromkeys(("FlaubertWithLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel"), masked_lm),
    # They search with beams: the mean is the model's own.
    **{f"{family}ForQuestionAnswering": lambda _: None for family in ("Flaubert", "XLM", "XLNet")},
    "ElectraForPreTraining": replaced_tokens,
    "FunnelForPreTraining": replaced_tokens,
    "SplinterForPreTraining": recurring_spans,
    "AlbertForPreTraining": partial(pretraining, pair_label="sentence_order_label", pair_logits="sop_logits"),
}

# The first suffix that fits the class name counts.
_BY_SUFFIX: dict[str, Callable[[nn.Module], HeadLoss]] = {
    "ForCausalLM": causal_lm,
    "LMHeadModel": causal_lm,
    "DoubleHeadsModel": causal_lm,
    "ForMaskedLM": masked_lm,
    "MTModel": conditional_generation,
    "ForConditionalGeneration": conditional_generation,
    "ForTextToText": conditional_generation,
    "ForSpeechToText": conditional_generation,
    "ForTextToSpeech": conditional_generation,
    "ForPreTraining": pretraining,
    "ForNextSentencePrediction": plain_classes,
    "ForTokenClassification": plain_classes,
    "ForMultipleChoice": plain_classes,
    "ForAudioClassification": plain_classes,
    "ForAudioFrameClassification": mean_of_samples,
    "ForXVector": mean_of_samples,
    "ForCTC": connectionist,
    "ForVideoClassification": sequence_classification,
    "ForSequenceClassification": sequence_classification,
    "ForImageClassification": sequence_classification,
    "BeitForMaskedImageModeling": masked_visual_tokens,
    "ForMaskedImageModeling": masked_pixels,
    "ForSemanticSegmentation": segmentation,
    "ForQuestionAnswering": question_answering,
    "ForQuestionAnsweringSimple": question_answering,
    "CLIPModel": lambda _: ContrastiveLoss(),
}
