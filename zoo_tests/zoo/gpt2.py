"""GPT-2: a decoder with a fused `Conv1D` for query, key and value, and learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head
from zoo_tests.zoo.labels import IGNORED, answer_spans, causal_loss, of_samples, of_tokens

NUM_CHOICES = 3
_CLASSES = {"num_labels": NUM_CLASSES}


def _double_heads_labels(batch: Batch, generator: torch.Generator) -> Batch:
    rows, choices, length = batch["input_ids"].shape
    summary_tokens = torch.randint(0, length, (rows, choices), generator=generator)
    return of_tokens()(batch, generator) | {"mc_token_ids": summary_tokens}


def _both_labels(batch: Batch, generator: torch.Generator) -> Batch:
    labels = _double_heads_labels(batch, generator)
    return labels | {"mc_labels": torch.randint(0, NUM_CHOICES, (len(batch["input_ids"]),), generator=generator)}


def both_heads(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion over both heads: the mean over the samples."""
    logits, labels = outputs.logits[..., :-1, :], batch["labels"][..., 1:]
    values = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    lm = values.view(labels.shape).sum((-1, -2))  # [samples]
    choice = F.cross_entropy(outputs.mc_logits, batch["mc_labels"], reduction="none")
    return (0.1 * lm + choice).mean()


GPT2 = Family(
    config_class="GPT2Config",
    config={
        "vocab_size": VOCAB_SIZE,
        "n_embd": 48,
        "n_layer": 5,
        "n_head": 4,
        "n_inner": 90,
        "n_positions": 40,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
        "pad_token_id": PAD_TOKEN,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    heads={
        "lm_head": Head("GPT2LMHeadModel", of_tokens(), reference_loss=causal_loss),
        "double_heads": Head("GPT2DoubleHeadsModel", _double_heads_labels, {"num_labels": 1}, num_choices=NUM_CHOICES),
        "double_heads_criterion": Head(
            "GPT2DoubleHeadsModel", _both_labels, {"num_labels": 1}, criterion=both_heads, num_choices=NUM_CHOICES
        ),
        "sequence": Head("GPT2ForSequenceClassification", of_samples(), _CLASSES),
        "token": Head("GPT2ForTokenClassification", of_tokens(NUM_CLASSES), {**_CLASSES, "classifier_dropout": 0.0}),
        "question_answering": Head("GPT2ForQuestionAnswering", answer_spans),
    },
    attention_dropout="attn_pdrop",
    attention_output="attn.c_proj",
)

FAMILIES = {"gpt2": GPT2}
