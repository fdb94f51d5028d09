"""Encoders whose layers normalise after each region: BERT and RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head
from zoo_tests.zoo.labels import (
    answer_spans,
    causal_loss,
    of_samples,
    of_tokens,
    real_numbers,
    several_of,
    token_loss,
)


def _no_labels(batch: Batch, generator: Any) -> Batch:
    return {}


def pooled_and_hidden(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on the bare model: the mean over the samples of a value that each has."""
    mask = batch["attention_mask"][..., None].to(outputs.last_hidden_state.dtype)
    hidden = (outputs.last_hidden_state.pow(3) * mask).sum((1, 2)) / mask.sum((1, 2))
    return (hidden + outputs.pooler_output.square().mean(-1)).mean()


def hidden_by_tokens(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A user's criterion that counts by itself: a sum over tokens, and how many they are."""
    mask = batch["attention_mask"]
    kept = outputs.last_hidden_state * mask[..., None].to(outputs.last_hidden_state.dtype)
    return kept.pow(3).sum() + outputs.pooler_output.sum(), mask.sum()


def _pretraining_labels(batch: Batch, generator: Any) -> Batch:
    return of_tokens()(batch, generator) | of_samples(2, "next_sentence_label")(batch, generator)


_CLASSES = {"num_labels": NUM_CLASSES}

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 86,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD_TOKEN,
}

BERT = Family(
    config_class="BertConfig",
    config=_SIZES,
    heads={
        "masked_lm": Head("BertForMaskedLM", of_tokens(), reference_loss=token_loss),
        "pretraining": Head("BertForPreTraining", _pretraining_labels),
        "lm_head": Head("BertLMHeadModel", of_tokens(), {"is_decoder": True}, reference_loss=causal_loss),
        "next_sentence": Head("BertForNextSentencePrediction", of_samples(2)),
        "sequence": Head("BertForSequenceClassification", of_samples(), _CLASSES),
        "regression": Head("BertForSequenceClassification", real_numbers, {"num_labels": 1}),
        "multi_label": Head("BertForSequenceClassification", several_of(), _CLASSES),
        "token": Head("BertForTokenClassification", of_tokens(NUM_CLASSES), _CLASSES),
        "question_answering": Head("BertForQuestionAnswering", answer_spans),
        "multiple_choice": Head("BertForMultipleChoice", of_samples(3, ignore_one=False), num_choices=3),
        "bare": Head("BertModel", _no_labels, criterion=pooled_and_hidden),
        "bare_counting": Head("BertModel", _no_labels, criterion=hidden_by_tokens),
    },
    token_types=True,
    attention_dropout="attention_probs_dropout_prob",
    attention_output="attention.output.dense",
)

ROBERTA = Family(
    config_class="RobertaConfig",
    config={**_SIZES, "type_vocab_size": 2},
    heads={
        "masked_lm": Head("RobertaForMaskedLM", of_tokens(), reference_loss=token_loss),
        "causal_lm": Head("RobertaForCausalLM", of_tokens(), {"is_decoder": True}, reference_loss=causal_loss),
        "sequence": Head("RobertaForSequenceClassification", of_samples(), _CLASSES),
        "token": Head("RobertaForTokenClassification", of_tokens(NUM_CLASSES), _CLASSES),
        "question_answering": Head("RobertaForQuestionAnswering", answer_spans),
        "multiple_choice": Head("RobertaForMultipleChoice", of_samples(3, ignore_one=False), num_choices=3),
        "bare": Head("RobertaModel", _no_labels, criterion=pooled_and_hidden),
    },
    token_types=True,
    attention_dropout="attention_probs_dropout_prob",
    attention_output="attention.output.dense",
)

FAMILIES = {"bert": BERT, "roberta": ROBERTA}
