"""Models of several towers: SAM and BLIP-2 with a language model of either kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo_tests.zoo.base import PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head, num_rows, ragged_tokens
from zoo_tests.zoo.labels import IGNORED, causal_loss, token_loss

_IMAGE_TOKEN = VOCAB_SIZE - 1
_QUERIES = 3


def no_labels(batch: Batch, generator: torch.Generator) -> Batch:
    return {}


def prompted_images(rows: int, step: int, generator: torch.Generator) -> Batch:
    """Images with two prompts of three points each."""
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "input_points": 32 * torch.rand(rows, 2, 3, 2, generator=generator),
    }


def masks_and_scores(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion: the mean over the samples of a value that each has."""
    return outputs.pred_masks.pow(3).mean() + outputs.iou_scores.square().mean()


def captioned_images(rows: int, step: int, generator: torch.Generator) -> Batch:
    """Images, and texts that begin with the placeholders of what the image becomes."""
    text = ragged_tokens((rows,), 9 + 2 * (step % 2), generator)
    text["input_ids"] = text["input_ids"].clamp(max=_IMAGE_TOKEN - 1)
    text["input_ids"][:, :_QUERIES] = _IMAGE_TOKEN
    text["attention_mask"][:, :_QUERIES] = 1
    return text | {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}


def _captions(batch: Batch, generator: torch.Generator) -> Batch:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    return {"labels": labels.masked_fill(labels == _IMAGE_TOKEN, IGNORED)}


def _answers(batch: Batch, generator: torch.Generator) -> Batch:
    labels = torch.randint(1, VOCAB_SIZE - 1, (num_rows(batch), 6), generator=generator)
    labels[1, 2:] = IGNORED
    return {"labels": labels}


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_QFORMER = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 35,
    "encoder_hidden_size": 32,
    "cross_attention_frequency": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_OPT = {
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 61,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "pad_token_id": PAD_TOKEN,
}
_T5 = {
    "model_type": "t5",
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 61,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": PAD_TOKEN,
    "decoder_start_token_id": PAD_TOKEN,
}


def _blip2(text: Mapping[str, Any], head: Head, **options: Any) -> Family:
    config = {
        "vision_config": _VISION,
        "qformer_config": _QFORMER,
        "text_config": dict(text),
        "num_query_tokens": _QUERIES,
        "image_token_index": _IMAGE_TOKEN,
        "use_decoder_only_language_model": text["model_type"] == "opt",
    }
    return Family("Blip2Config", config, {"generation": head}, inputs=captioned_images, **options)


SAM = Family(
    "SamConfig",
    {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "mlp_dim": 43,
            "output_channels": 24,
            "num_pos_feats": 12,
            "window_size": 3,
            "global_attn_indexes": [1, 3],
        },
        "prompt_encoder_config": {"hidden_size": 24, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {
            "hidden_size": 24,
            "mlp_dim": 35,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "attention_downsample_rate": 2,
            "iou_head_hidden_dim": 20,
        },
    },
    {"masks": Head("SamModel", no_labels, criterion=masks_and_scores)},
    inputs=prompted_images,
    sequence_parallel=False,
)

FAMILIES = {
    "sam": SAM,
    "blip_2": _blip2(_OPT, Head("Blip2ForConditionalGeneration", _captions, reference_loss=causal_loss)),
    # T5's norms round to fp32.
    "blip_2_t5": _blip2(
        _T5, Head("Blip2ForConditionalGeneration", _answers, reference_loss=token_loss), precision="fp32"
    ),
}
