"""CLIP: a tower of images, a tower of texts, and both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo_tests.zoo.base import LENGTHS, NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Batch, Family, Head, ragged_tokens
from zoo_tests.zoo.images import CHANNELS, images, mean_features, no_labels
from zoo_tests.zoo.labels import of_samples

IMAGE_SIZE, PATCH_SIZE = 12, 4


def _pairs(rows: int, step: int, generator: torch.Generator) -> Batch:
    tokens = ragged_tokens((rows,), LENGTHS[step % len(LENGTHS)], generator)
    return tokens | images(IMAGE_SIZE)(rows, step, generator)


def _ask_for_loss(batch: Batch, generator: torch.Generator) -> Batch:
    return {"return_loss": True}


def similarity(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on both towers: how far the texts are from their images."""
    return -(outputs.text_embeds * outputs.image_embeds.tanh()).sum(-1).mean()


def mean_of_text(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on the text tower: the mean over the samples of a value that each has."""
    mask = batch["attention_mask"][..., None].to(outputs.last_hidden_state.dtype)
    embeds = outputs.get("text_embeds", outputs.get("pooler_output"))
    return ((outputs.last_hidden_state.pow(3) * mask).mean((1, 2)) + embeds.square().mean(-1)).mean()


def mean_of_image(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A user's criterion on the projected images: the mean over the samples of a value that each has."""
    return outputs.image_embeds.pow(3).mean()


_VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 86,
    "attention_dropout": 0.0,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "num_channels": CHANNELS,
    "projection_dim": 22,
}
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 54,
    "max_position_embeddings": 40,
    "attention_dropout": 0.0,
    "pad_token_id": PAD_TOKEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "projection_dim": 22,
}


def _both(vision_layers: int, text_layers: int) -> dict[str, Any]:
    vision = {**_VISION, "num_hidden_layers": vision_layers}
    return {"vision_config": vision, "text_config": {**_TEXT, "num_hidden_layers": text_layers}, "projection_dim": 22}


CLIP = Family(
    config_class="CLIPConfig",
    config=_both(5, 1),
    heads={"image": Head("CLIPForImageClassification", of_samples(), {"num_labels": NUM_CLASSES})},
    inputs=images(IMAGE_SIZE),
)

CLIP_VISION = Family(
    config_class="CLIPVisionConfig",
    config=_VISION,
    heads={
        "bare": Head("CLIPVisionModel", no_labels, criterion=mean_features),
        "projection": Head("CLIPVisionModelWithProjection", no_labels, criterion=mean_of_image),
    },
    inputs=images(IMAGE_SIZE),
    attention_dropout="attention_dropout",
    attention_output="self_attn.out_proj",
)

CLIP_TEXT = Family(
    config_class="CLIPTextConfig",
    config=_TEXT,
    heads={
        "bare": Head("CLIPTextModel", no_labels, criterion=mean_of_text),
        "projection": Head("CLIPTextModelWithProjection", no_labels, criterion=mean_of_text),
    },
    attention_dropout="attention_dropout",
    attention_output="self_attn.out_proj",
)

CLIP_TOWERS = Family(
    config_class="CLIPConfig",
    config=_both(2, 3),
    heads={
        "similarity": Head("CLIPModel", no_labels, criterion=similarity),
        "similarity_of_few_texts": Head("CLIPModel", no_labels, _both(4, 1), criterion=similarity),
        "contrastive": Head("CLIPModel", _ask_for_loss, _both(3, 2), samples_are_coupled=True),
    },
    inputs=_pairs,
)

FAMILIES = {"clip": CLIP, "clip_vision": CLIP_VISION, "clip_text": CLIP_TEXT, "clip_towers": CLIP_TOWERS}
