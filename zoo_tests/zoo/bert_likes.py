"""Encoders with the layers of BERT or RoBERTa under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo_tests.zoo.base import LENGTHS, Batch, Family, Head, ragged_tokens
from zoo_tests.zoo.bert import _SIZES, _no_labels
from zoo_tests.zoo.encoders import _heads, _hidden
from zoo_tests.zoo.labels import causal_loss, of_tokens

_MAX_BOX = 50
_QUESTIONS = 3


def _like(config_class: str, prefix: str, heads: Mapping[str, Head] | None = None, **options: Any) -> Family:
    """A family with RoBERTa's heads, where no others are given."""
    causal_lm = Head(f"{prefix}ForCausalLM", of_tokens(), {"is_decoder": True}, reference_loss=causal_loss)
    config = {**_SIZES, **options.pop("config", {})}
    return Family(
        config_class,
        config,
        _heads(prefix) | {"causal_lm": causal_lm} if heads is None else heads,
        attention_dropout="attention_probs_dropout_prob",
        **{"attention_output": "attention.output.dense", **options},
    )


def _boxed_tokens(rows: int, step: int, generator: torch.Generator) -> Batch:
    """Tokens and where they are on the page: [left, top, right, bottom]."""
    batch = ragged_tokens((rows,), LENGTHS[step % len(LENGTHS)], generator)
    corners = torch.randint(0, _MAX_BOX, (2, *batch["input_ids"].shape, 2), generator=generator).sort(0).values
    return batch | {"bbox": torch.cat([corners[0], corners[1]], -1)}


def _kept_positions(batch: Batch, count: int, generator: torch.Generator) -> Tensor:
    """[rows, count] positions that are not padding: Splinter's loss of a span in padding is the largest number."""
    return torch.multinomial(batch["attention_mask"].float(), count, replacement=True, generator=generator)


def _spans(batch: Batch, generator: torch.Generator) -> Batch:
    """Start and end of an answer; the second sample has none, whose span lies behind the end."""
    positions = _kept_positions(batch, 2, generator)
    positions[1] = batch["input_ids"].shape[1] + 5
    return {"start_positions": positions[:, 0], "end_positions": positions[:, 1]}


def _recurring_spans(batch: Batch, generator: torch.Generator) -> Batch:
    """Spans of a few questions a sample; other questions are padding at the start and at the end."""
    questions, start, end = (_kept_positions(batch, _QUESTIONS, generator) for _ in range(3))
    start[:, -1] = end[::2, 0] = 0
    start[0, 0] = batch["input_ids"].shape[1] + 5  # taken for the last position, which this sample has
    return {"question_positions": questions, "start_positions": start, "end_positions": end}


def _only(prefix: str, *names: str) -> dict[str, Head]:
    return {name: head for name, head in _heads(prefix).items() if name in names}


FAMILIES = {
    "xlm_roberta": _like("XLMRobertaConfig", "XLMRoberta", config={"type_vocab_size": 2}, token_types=True),
    "camembert": _like("CamembertConfig", "Camembert", config={"type_vocab_size": 2}, token_types=True),
    "data2vec_text": _like("Data2VecTextConfig", "Data2VecText", config={"type_vocab_size": 2}, token_types=True),
    "roberta_prelayernorm": _like(
        "RobertaPreLayerNormConfig", "RobertaPreLayerNorm", config={"type_vocab_size": 2}, token_types=True
    ),
    "bert_generation": _like(
        "BertGenerationConfig",
        "BertGeneration",
        {
            "decoder": Head("BertGenerationDecoder", of_tokens(), {"is_decoder": True}, reference_loss=causal_loss),
            "bare": Head("BertGenerationEncoder", _no_labels, criterion=_hidden),
        },
    ),
    "layoutlm": _like(
        "LayoutLMConfig",
        "LayoutLM",
        _only("LayoutLM", "masked_lm", "sequence", "token", "question_answering", "bare"),
        config={"max_2d_position_embeddings": _MAX_BOX},
        token_types=True,
        inputs=_boxed_tokens,
    ),
    "splinter": _like(
        "SplinterConfig",
        "Splinter",
        {
            "question_answering": Head("SplinterForQuestionAnswering", _spans),
            "pretraining": Head("SplinterForPreTraining", _recurring_spans),
            "bare": Head("SplinterModel", _no_labels, criterion=_hidden),
        },
        config={"question_token_id": 3},
        token_types=True,
        attention_by_hand=True,  # eager alone: transformers has no other kernel for it
        precision="fp32",  # its heads mask in fp32, where the minimum of fp64 is infinite
    ),
    "mpnet": _like(
        "MPNetConfig",
        "MPNet",
        _heads("MPNet"),
        attention_output="attn.o",
        attention_by_hand=True,
    ),
}
