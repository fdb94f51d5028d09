"""BEiT: biases of relative positions, layer scales, and heads that read the hidden states of several layers."""

from __future__ import annotations

import torch

from zoo_tests.zoo.base import NUM_CLASSES, Batch, Family, Head
from zoo_tests.zoo.images import CHANNELS, images, mean_feature_maps, mean_features, no_labels
from zoo_tests.zoo.labels import IGNORED, of_samples

IMAGE_SIZE, PATCH_SIZE = 12, 4
VISUAL_TOKENS = 131  # a prime
NOT_SEGMENTED = 255


def _visual_tokens(batch: Batch, generator: torch.Generator) -> Batch:
    """A visual token for each masked patch; another share of them in every sample, none in the second."""
    shape = (len(batch["pixel_values"]), (IMAGE_SIZE // PATCH_SIZE) ** 2)
    share = torch.linspace(0.1, 0.9, shape[0])[:, None]
    share[1] = 0.0
    masked = torch.rand(shape, generator=generator) < share
    labels = torch.randint(0, VISUAL_TOKENS, shape, generator=generator)
    return {"bool_masked_pos": masked, "labels": labels.masked_fill(~masked, IGNORED)}


def _list_of_masked(batch: Batch) -> Batch:
    return {"labels": batch["labels"][batch["bool_masked_pos"]]}


def _segments(batch: Batch, generator: torch.Generator) -> Batch:
    rows, _, height, width = batch["pixel_values"].shape
    labels = torch.randint(0, NUM_CLASSES, (rows, height, width), generator=generator)
    labels[1] = NOT_SEGMENTED
    return {"labels": labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.3, NOT_SEGMENTED)}


_CLASSES = {"num_labels": NUM_CLASSES}
_SHARED_BIAS = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
_SEGMENTATION = {
    **_CLASSES,
    "out_indices": [1, 2, 4, 5],
    "auxiliary_channels": 6,
    "pool_scales": [1, 2],
    "semantic_loss_ignore_index": NOT_SEGMENTED,
}

BEIT = Family(
    config_class="BeitConfig",
    config={
        "vocab_size": VISUAL_TOKENS,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 86,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "num_channels": CHANNELS,
        "use_relative_position_bias": True,
        "layer_scale_init_value": 0.5,
    },
    heads={
        "image": Head("BeitForImageClassification", of_samples(), _CLASSES),
        "image_shared_bias": Head("BeitForImageClassification", of_samples(), {**_CLASSES, **_SHARED_BIAS}),
        "image_class_token": Head(
            "BeitForImageClassification",
            of_samples(),
            {**_CLASSES, "use_mean_pooling": False, "layer_scale_init_value": 0.0},
        ),
        "masked_image": Head(
            "BeitForMaskedImageModeling", _visual_tokens, {"use_mask_token": True}, native_labels=_list_of_masked
        ),
        # Its batch norms read all samples, and its head hidden states of both stages.
        "segmentation": Head(
            "BeitForSemanticSegmentation", _segments, _SEGMENTATION, layout="tp2pp2", samples_are_coupled=True
        ),
        "bare": Head("BeitModel", no_labels, {"use_absolute_position_embeddings": True}, criterion=mean_features),
        "backbone": Head(
            "BeitBackbone",
            no_labels,
            {"out_indices": [1, 3, 5], "add_fpn": False},
            criterion=mean_feature_maps,
            layout="tp2pp2",
        ),
    },
    inputs=images(IMAGE_SIZE),
    attention_dropout="attention_probs_dropout_prob",
    attention_output="attention.o_proj",
)

FAMILIES = {"beit": BEIT}
