"""Encoder-decoders: T5 and mT5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo_tests.zoo.base import LENGTHS, NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head, ragged_tokens
from zoo_tests.zoo.labels import IGNORED, of_samples, of_tokens, token_loss

_EOS = 1
_CLASSES = {"num_labels": NUM_CLASSES}


def target_tokens(batch: Batch, generator: torch.Generator) -> Batch:
    """Target sequences of a length of their own, padded with ignored labels; all but one of the second are ignored."""
    rows, length = batch["input_ids"].shape
    target = ragged_tokens((rows,), length - 3, generator)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, IGNORED)
    labels[1, :-1] = IGNORED  # not all: mBART looks for the last label that is not
    return {"labels": labels}


def _with_one_end(rows: int, step: int, generator: torch.Generator) -> Batch:
    """Tokens with one end-of-sequence token a sample, which sequence classification reads."""
    batch = ragged_tokens((rows,), LENGTHS[step % len(LENGTHS)], generator)
    tokens = batch["input_ids"].masked_fill(batch["input_ids"] == _EOS, _EOS + 1)
    last = (batch["attention_mask"] * torch.arange(tokens.shape[1])).argmax(1)
    tokens[torch.arange(rows), last] = _EOS
    return batch | {"input_ids": tokens}


def answer_in_sequence(batch: Batch, generator: torch.Generator) -> Batch:
    """Start and end of an answer; those of the second sample lie behind the sequence."""
    rows, length = batch["input_ids"].shape
    positions = torch.randint(0, length, (2, rows), generator=generator)
    positions[:, 1] = length + 5
    return {"start_positions": positions[0], "end_positions": positions[1]}


def _no_labels(batch: Batch, generator: torch.Generator) -> Batch:
    return {}


def _decoder_tokens(batch: Batch, generator: torch.Generator) -> Batch:
    return {"decoder_input_ids": ragged_tokens((len(batch["input_ids"]),), 6, generator)["input_ids"]}


def mean_of_hidden(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on a bare model: the mean over the samples of a value that each has."""
    return outputs.last_hidden_state.pow(3).mean((1, 2)).mean()


def _like_t5(prefix: str, **config: Any) -> Family:
    return Family(
        config_class=f"{prefix}Config",
        config={
            "vocab_size": VOCAB_SIZE,
            "d_model": 48,
            "d_kv": 8,
            "d_ff": 83,
            "num_layers": 3,
            "num_decoder_layers": 4,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "dropout_rate": 0.0,
            "classifier_dropout": 0.0,
            "pad_token_id": PAD_TOKEN,
            "decoder_start_token_id": PAD_TOKEN,
            "eos_token_id": _EOS,
            **config,
        },
        heads={
            "generation": Head(f"{prefix}ForConditionalGeneration", target_tokens, reference_loss=token_loss),
            "sequence": Head(f"{prefix}ForSequenceClassification", of_samples(), _CLASSES),
            "token": Head(f"{prefix}ForTokenClassification", of_tokens(NUM_CLASSES), _CLASSES),
            "question_answering": Head(f"{prefix}ForQuestionAnswering", answer_in_sequence),
            "encoder": Head(f"{prefix}EncoderModel", _no_labels, criterion=mean_of_hidden),
            "bare": Head(f"{prefix}Model", _decoder_tokens, criterion=mean_of_hidden),
        },
        inputs=_with_one_end,
        attention_dropout="dropout_rate",
        attention_output="SelfAttention.o",
        precision="fp32",
    )


# T5's norms round to fp32.
T5 = _like_t5("T5")
MT5 = _like_t5("MT5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)

UMT5 = _like_t5("UMT5")

FAMILIES = {"t5": T5, "mt5": MT5, "umt5": UMT5}
