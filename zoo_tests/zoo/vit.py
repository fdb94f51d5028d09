"""Encoders of images: ViT and DeiT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_tests.zoo.base import NUM_CLASSES, Batch, Family, Head
from zoo_tests.zoo.images import CHANNELS, images, masked_patches, mean_features, no_labels
from zoo_tests.zoo.labels import of_samples, real_numbers, several_of

IMAGE_SIZE, PATCH_SIZE = 12, 4  # 9 patches and one or two tokens beside them: no number of ranks divides their number


def both_classifiers(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Distillation: the class token learns the labels, the distillation token what a teacher has said."""
    classes = F.cross_entropy(outputs.cls_logits, batch["class_of_sample"])
    teacher = F.cross_entropy(outputs.distillation_logits, batch["class_of_teacher"])
    return (classes + teacher) / 2


def _classes_and_teacher(batch: Batch, generator: torch.Generator) -> Batch:
    rows = len(batch["pixel_values"])
    classes = torch.randint(0, NUM_CLASSES, (2, rows), generator=generator)
    return {"class_of_sample": classes[0], "class_of_teacher": classes[1]}


_CLASSES = {"num_labels": NUM_CLASSES}


def _like_vit(prefix: str, **heads: Head) -> Family:
    return Family(
        config_class=f"{prefix}Config",
        config={
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "intermediate_size": 86,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "encoder_stride": PATCH_SIZE,
            "num_channels": CHANNELS,
        },
        heads={
            "image": Head(f"{prefix}ForImageClassification", of_samples(), _CLASSES),
            "regression": Head(f"{prefix}ForImageClassification", real_numbers, {"num_labels": 1}),
            "multi_label": Head(f"{prefix}ForImageClassification", several_of(), _CLASSES),
            "masked_image": Head(f"{prefix}ForMaskedImageModeling", masked_patches(IMAGE_SIZE // PATCH_SIZE)),
            "bare": Head(f"{prefix}Model", no_labels, criterion=mean_features),
            **heads,
        },
        inputs=images(IMAGE_SIZE),
        attention_dropout="attention_probs_dropout_prob",
        attention_output="attention.o_proj",
    )


VIT = _like_vit("ViT")
DEIT = _like_vit(
    "DeiT",
    teacher=Head("DeiTForImageClassificationWithTeacher", _classes_and_teacher, _CLASSES, criterion=both_classifiers),
)

FAMILIES = {"vit": VIT, "deit": DEIT}
