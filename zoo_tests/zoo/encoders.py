"""Encoders: ELECTRA, ERNIE, DistilBERT, DeBERTa-v2 and ALBERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head
from zoo_tests.zoo.bert import _SIZES, _no_labels, _pretraining_labels
from zoo_tests.zoo.labels import answer_spans, causal_loss, of_samples, of_tokens, token_loss

_CLASSES = {"num_labels": NUM_CLASSES}


def _heads(prefix: str) -> dict[str, Head]:
    return {
        "masked_lm": Head(f"{prefix}ForMaskedLM", of_tokens(), reference_loss=token_loss),
        "sequence": Head(f"{prefix}ForSequenceClassification", of_samples(), _CLASSES),
        "token": Head(f"{prefix}ForTokenClassification", of_tokens(NUM_CLASSES), _CLASSES),
        "question_answering": Head(f"{prefix}ForQuestionAnswering", answer_spans),
        "multiple_choice": Head(f"{prefix}ForMultipleChoice", of_samples(3, ignore_one=False), num_choices=3),
        "bare": Head(f"{prefix}Model", _no_labels, criterion=_hidden),
    }


def _hidden(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on the bare model: the mean over the samples of a value that each has.

    It is a mean over features, too: with their sum ALBERT's training diverges and blows rounding up to 1e-4.
    """
    mask = batch["attention_mask"][..., None].to(outputs.last_hidden_state.dtype)
    return ((outputs.last_hidden_state.pow(3).mean(-1, keepdim=True) * mask).sum((1, 2)) / mask.sum((1, 2))).mean()


def _replaced(batch: Batch, generator: torch.Generator) -> Batch:
    """Which tokens were replaced (ELECTRA's discriminator)."""
    return {"labels": torch.randint(0, 2, batch["input_ids"].shape, generator=generator)}


def _replaced_loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """transformers' labels are fp32, and so is its loss."""
    kept = batch["attention_mask"] == 1
    logits = outputs.logits[kept]
    return F.binary_cross_entropy_with_logits(logits, batch["labels"][kept].to(logits.dtype))


def _order_labels(batch: Batch, generator: torch.Generator) -> Batch:
    return of_tokens()(batch, generator) | of_samples(2, "sentence_order_label")(batch, generator)


_BERT_LIKE = {"attention_dropout": "attention_probs_dropout_prob", "token_types": True}

ERNIE = Family(
    "ErnieConfig",
    {**_SIZES, "use_task_id": True},
    _heads("Ernie")
    | {
        "pretraining": Head("ErnieForPreTraining", _pretraining_labels),
        "next_sentence": Head("ErnieForNextSentencePrediction", of_samples(2)),
        "causal_lm": Head("ErnieForCausalLM", of_tokens(), {"is_decoder": True}, reference_loss=causal_loss),
    },
    attention_output="attention.output.dense",
    **_BERT_LIKE,
)

ELECTRA = Family(
    "ElectraConfig",
    {**_SIZES, "embedding_size": 30, "summary_last_dropout": 0.0},
    _heads("Electra")
    | {
        "discriminator": Head("ElectraForPreTraining", _replaced, reference_loss=_replaced_loss),
        "causal_lm": Head("ElectraForCausalLM", of_tokens(), {"is_decoder": True}, reference_loss=causal_loss),
    },
    attention_output="attention.output.dense",
    **_BERT_LIKE,
)

DISTILBERT = Family(
    "DistilBertConfig",
    {
        "vocab_size": VOCAB_SIZE,
        "dim": 48,
        "n_layers": 5,
        "n_heads": 4,
        "hidden_dim": 86,
        "max_position_embeddings": 40,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "qa_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "pad_token_id": PAD_TOKEN,
    },
    _heads("DistilBert"),
    attention_dropout="attention_dropout",
    attention_output="attention.out_lin",
)

_DISENTANGLED = {
    **_SIZES,
    "relative_attention": True,
    "position_buckets": 6,
    "max_relative_positions": 20,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
    "pooler_dropout": 0.0,
    "type_vocab_size": 0,
}
# Its sequence-classification loss is in fp32 whatever the dtype.
_deberta_heads = _heads("DebertaV2") | {
    "sequence": replace(
        _heads("DebertaV2")["sequence"], reference_loss=lambda outputs, batch: token_loss(outputs, batch)
    )
}
_deberta_lm = _deberta_heads["masked_lm"]
DEBERTA_V2 = Family(
    "DebertaV2Config",
    {**_DISENTANGLED, "share_att_key": True},
    _deberta_heads
    | {
        "content_to_position": replace(_deberta_lm, config={"share_att_key": False, "pos_att_type": ["c2p"]}),
        "position_to_content": replace(_deberta_lm, config={"share_att_key": False, "pos_att_type": ["p2c"]}),
        "absolute": replace(
            _deberta_lm,
            config={"relative_attention": False, "position_biased_input": True, "embedding_size": 30},
        ),
        "newer_head": replace(_deberta_lm, config={"legacy": False}),
    },
    attention_dropout="attention_probs_dropout_prob",
    attention_output="attention.output.dense",
    attention_by_hand=True,
    sequence_parallel=False,
)
DEBERTA_V2_CONVOLVED = Family(
    "DebertaV2Config",
    {**_DISENTANGLED, "conv_kernel_size": 3, "conv_act": "gelu", "type_vocab_size": 2},
    {"masked_lm": _deberta_lm},
    token_types=True,
    sequence_parallel=False,
)

ALBERT = Family(
    "AlbertConfig",
    {**_SIZES, "embedding_size": 30, "num_hidden_groups": 2, "classifier_dropout_prob": 0.0},
    _heads("Albert")
    | {
        "pretraining": Head("AlbertForPreTraining", _order_labels),
        # As released: one group, which every stage runs.
        "one_group": Head(
            "AlbertForPreTraining", _order_labels, {"num_hidden_groups": 1, "inner_group_num": 2}, layout="pp4"
        ),
        "one_group_cut": Head("AlbertForPreTraining", _order_labels, {"num_hidden_groups": 1}),
    },
    attention_output="attention.dense",
    **_BERT_LIKE,
)

FAMILIES = {
    "ernie": ERNIE,
    "electra": ELECTRA,
    "distilbert": DISTILBERT,
    "deberta_v2": DEBERTA_V2,
    "deberta_v2_convolved": DEBERTA_V2_CONVOLVED,
    "albert": ALBERT,
}
