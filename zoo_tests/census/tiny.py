"""A tiny configuration and a small ragged batch for any head class."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from zoo_tests.census.classes import HeadClass
from zoo_tests.census.families import DEFAULT, FIELDS, further_inputs
from zoo_tests.zoo.base import ragged_tokens

_IGNORED = -100
_ONE_LABEL = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
    "ForXVector",
    "ForVisualReasoning",
    "ForImageAndTextRetrieval",
)
_MISSING = object()
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_num_layers", "decoder_num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "embedding_size", "word_embed_proj_dim", "rotary_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "seq_length"), 64),
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "text_vocab_size"), 101),
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "image_size": 16,
    "patch_size": 4,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


def tiny_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """The class with small sizes wherever a field has one of the usual names; nothing drops out."""
    default = config_class()
    special = FIELDS.get(config_class.model_type, {})
    fields = {**vars(default), **{name: _read(default, name) for name in _SIZES if _is_written(config_class, name)}}
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            values[name] = tiny_config(type(value)).to_dict()
        elif name in _SIZES and value is not _MISSING and (isinstance(value, int | list) or value is None):
            values[name] = _SIZES[name]
        elif isinstance(value, float) and ("drop" in name or name.endswith("_pdrop")):
            values[name] = 0.0
    if "kv_lora_rank" in fields:  # latent attention has a key and a value for every head
        values["num_key_value_heads"] = 4
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict) and "mrope_section" in fields[name]:
            values[name] = {**fields[name], "mrope_section": [2, 1, 1]}
    for name, value in special.items():
        if value is DEFAULT:
            values.pop(name, None)
        else:
            values[name] = {**values[name], **value} if isinstance(value, dict) and name in values else value
    config = config_class(**values)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _is_written(config_class: type[PretrainedConfig], name: str) -> bool:
    found = getattr(config_class, name, None)
    return not (isinstance(found, property) and found.fset is None)


def _read(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, _MISSING)
    except Exception:  # some say that a field differs from layer to layer
        return _MISSING


def build(head: HeadClass) -> nn.Module:
    """The model, always the same, in training mode; fp32."""
    model_class = getattr(importlib.import_module(head.module), head.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        config = tiny_config(model_class.config_class)
        model = model_class(config)
        with torch.no_grad():
            for param in model.parameters():
                if param.is_floating_point():
                    param.add_(torch.randn_like(param), alpha=0.02)
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # some heads have one that no field names
                module.p = 0.0
    return model.float().train()


def batch_for(head: HeadClass, model: nn.Module, step: int, rows: int = 6) -> dict[str, Tensor]:
    """Text, padded on the right, or images, with the labels of the head."""
    generator = torch.Generator().manual_seed(1000 + step)
    takes = inspect.signature(model.forward).parameters
    batch: dict[str, Tensor] = {}
    if "input_ids" in takes:
        shape = (rows, 3) if head.kind == "ForMultipleChoice" else (rows,)
        text = ragged_tokens(shape, 11 - 2 * step, generator)
        batch["input_ids"] = (text["input_ids"] % 90 + 5) * text["attention_mask"]
        if "attention_mask" in takes:
            batch["attention_mask"] = text["attention_mask"]
    elif "pixel_values" in takes:
        size, channels = getattr(model.config, "image_size", 16), getattr(model.config, "num_channels", 3)
        sides = size if isinstance(size, tuple | list) else (size, size)
        batch["pixel_values"] = torch.randn(rows, channels, *sides, generator=generator)
    elif "pixel_values_videos" in takes:
        batch["pixel_values_videos"] = torch.randn(rows, 4, 3, 16, 16, generator=generator)
    elif "input_values" in takes or "input_features" in takes:
        name = "input_values" if "input_values" in takes else "input_features"
        batch[name] = torch.randn(rows, 500, generator=generator)
    else:
        raise NotImplementedError("takes neither text, images nor sound")
    if model.config.is_encoder_decoder and head.kind == "ForSequenceClassification":  # reads the last end of a text
        ends = batch["attention_mask"].sum(1) - 1
        batch["input_ids"][torch.arange(rows), ends] = model.config.eos_token_id
    batch |= further_inputs(head, model, batch, generator)
    return _labels(head, model, batch, rows, generator) | batch


def _labels(
    head: HeadClass, model: nn.Module, batch: dict[str, Tensor], rows: int, generator: torch.Generator
) -> dict[str, Tensor]:
    classes = getattr(model.config, "num_labels", 2)
    if head.kind in ("ForQuestionAnswering", "ForQuestionAnsweringSimple"):
        positions = torch.randint(0, batch["input_ids"].shape[1], (2, rows), generator=generator)
        return {"start_positions": positions[0], "end_positions": positions[1]}
    if head.kind in _ONE_LABEL:
        return {"labels": torch.randint(0, classes, (rows,), generator=generator)}
    if head.kind == "ForNextSentencePrediction":
        return {"labels": torch.randint(0, 2, (rows,), generator=generator)}
    if head.kind == "ForMultipleChoice":
        return {"labels": torch.randint(0, 3, (rows,), generator=generator)}
    if head.kind == "ForAudioFrameClassification":
        frames = model(**batch).logits.shape[1]
        marks = torch.randint(0, classes, (rows, frames), generator=generator)
        return {"labels": torch.nn.functional.one_hot(marks, classes)}
    if head.kind == "ForCTC":
        return {"labels": torch.randint(1, model.config.vocab_size, (rows, 3), generator=generator)}
    if head.kind == "ForSemanticSegmentation":
        sides = batch["pixel_values"].shape[-2:]
        return {"labels": torch.randint(0, classes, (rows, *sides), generator=generator)}
    if head.kind == "ForDepthEstimation":
        return {"labels": torch.rand(rows, *batch["pixel_values"].shape[-2:], generator=generator)}
    if (
        head.kind in ("ForConditionalGeneration", "ForSpeechToText")
        and {"input_features", "input_values"} & batch.keys()
    ):
        return {"labels": torch.randint(5, 90, (rows, 7), generator=generator)}
    if "input_ids" not in batch:
        raise NotImplementedError(f"labels of a {head.kind} on images")
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    if head.kind == "ForTokenClassification":
        labels = torch.randint(0, classes, mask.shape, generator=generator)
        return {"labels": labels.masked_fill(mask == 0, _IGNORED)}
    if head.kind == "ForPreTraining" and "next_sentence_label" in inspect.signature(model.forward).parameters:
        pairs = {"next_sentence_label": torch.randint(0, 2, (rows,), generator=generator)}
        return pairs | {"labels": batch["input_ids"].masked_fill(mask == 0, _IGNORED)}
    labels = batch["input_ids"].masked_fill(mask == 0, _IGNORED)
    labels[1, 1:4] = _IGNORED
    return {"labels": labels}
