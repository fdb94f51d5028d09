"""BART and the encoder-decoders like it; Whisper reads spectra."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head, ragged_tokens
from zoo_tests.zoo.labels import IGNORED, of_samples, of_tokens, token_loss
from zoo_tests.zoo.t5 import (
    _EOS,
    _decoder_tokens,
    _with_one_end,
    answer_in_sequence,
    mean_of_hidden,
    target_tokens,
)

_CLASSES = {"num_labels": NUM_CLASSES}
_DECODER_ALONE = {"is_decoder": True, "is_encoder_decoder": False, "encoder_layers": 4}
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 83,
    "decoder_ffn_dim": 70,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": PAD_TOKEN,
    "bos_token_id": 2,
    "eos_token_id": _EOS,
    "decoder_start_token_id": PAD_TOKEN,
}


def _like_bart(prefix: str, *heads: str, **config: Any) -> Family:
    known = {
        "generation": Head(f"{prefix}ForConditionalGeneration", target_tokens, reference_loss=token_loss),
        "translation": Head(f"{prefix}MTModel", target_tokens, reference_loss=token_loss),
        "sequence": Head(f"{prefix}ForSequenceClassification", of_samples(), _CLASSES),
        "question_answering": Head(f"{prefix}ForQuestionAnswering", answer_in_sequence),
        "causal_lm": Head(f"{prefix}ForCausalLM", of_tokens(), _DECODER_ALONE, reference_loss=token_loss),
        "bare": Head(f"{prefix}Model", _decoder_tokens, criterion=mean_of_hidden),
    }
    return Family(
        config_class=f"{prefix}Config",
        config={**_SIZES, **config},
        heads={name: known[name] for name in heads},
        inputs=_with_one_end,
        attention_dropout="attention_dropout",
        attention_output="encoder.layers.0.self_attn.out_proj" if heads[0] != "causal_lm" else "self_attn.out_proj",
    )


def spectra(rows: int, step: int, generator: torch.Generator) -> Batch:
    """[rows, mel bins, frames]; Whisper takes no other length than the configuration's."""
    return {"input_features": torch.randn(rows, 10, 36, generator=generator)}


def _targets(batch: Batch, generator: torch.Generator) -> Batch:
    target = ragged_tokens((len(batch["input_features"]),), 9, generator)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, IGNORED)
    labels[1] = IGNORED
    return {"labels": labels}


def _target_tokens(batch: Batch, generator: torch.Generator) -> Batch:
    return {"decoder_input_ids": ragged_tokens((len(batch["input_features"]),), 9, generator)["input_ids"]}


WHISPER = Family(
    config_class="WhisperConfig",
    config={
        **{name: value for name, value in _SIZES.items() if name != "max_position_embeddings"},
        "num_mel_bins": 10,
        "max_source_positions": 18,
        "max_target_positions": 40,
        "classifier_proj_size": 14,
        "begin_suppress_tokens": None,
    },
    heads={
        "generation": Head("WhisperForConditionalGeneration", _targets, reference_loss=token_loss),
        "audio": Head("WhisperForAudioClassification", of_samples(), _CLASSES),
        "bare": Head("WhisperModel", _target_tokens, criterion=mean_of_hidden),
    },
    inputs=spectra,
    attention_dropout="attention_dropout",
    attention_output="encoder.layers.0.self_attn.out_proj",
)

# Streams that each predict another of the next tokens, a smoothed loss in fp32, attention with a mask for every head.
PROPHETNET = Family(
    config_class="ProphetNetConfig",
    config={
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "num_encoder_layers": 3,
        "num_decoder_layers": 4,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 83,
        "decoder_ffn_dim": 70,
        "max_position_embeddings": 40,
        "num_buckets": 8,
        "relative_max_distance": 16,
        "use_cache": False,  # its cache has as many layers as the encoder
        "ngram": 3,
        "eps": 0.1,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": PAD_TOKEN,
        "bos_token_id": 2,
        "eos_token_id": _EOS,
        "decoder_start_token_id": PAD_TOKEN,
    },
    heads={
        "generation": Head("ProphetNetForConditionalGeneration", target_tokens),
        "causal_lm": Head("ProphetNetForCausalLM", of_tokens()),
    },
    inputs=_with_one_end,
    attention_output="encoder.layers.0.self_attn.out_proj",
    attention_by_hand=True,
    precision="fp32",
    sequence_parallel=False,
)

FAMILIES = {
    "bart": _like_bart("Bart", "generation", "sequence", "question_answering", "causal_lm", "bare"),
    "mbart": _like_bart(
        "MBart", "generation", "sequence", "question_answering", "causal_lm", "bare", scale_embedding=True
    ),
    "mvp": replace(
        _like_bart("Mvp", "generation", "sequence", "question_answering", "causal_lm", "bare"), attention_by_hand=True
    ),
    "plbart": _like_bart("PLBart", "generation", "sequence", "causal_lm", "bare"),
    "pegasus": _like_bart("Pegasus", "generation", "causal_lm", "bare"),
    "blenderbot": _like_bart("Blenderbot", "generation", "causal_lm", "bare"),
    "blenderbot_small": _like_bart("BlenderbotSmall", "generation", "causal_lm", "bare"),
    "marian": _like_bart("Marian", "translation", "causal_lm", "bare"),
    "m2m_100": _like_bart("M2M100", "generation", "bare"),
    "whisper": WHISPER,
    "prophetnet": PROPHETNET,
}
