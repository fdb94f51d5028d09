"""Encoders with shifted windows: Swin and SwinV2."""

from __future__ import annotations

from typing import Any

from zoo_tests.zoo.base import NUM_CLASSES, Family, Head
from zoo_tests.zoo.images import CHANNELS, images, masked_patches, mean_feature_maps, mean_features, no_labels
from zoo_tests.zoo.labels import of_samples

IMAGE_SIZE, PATCH_SIZE = 24, 2  # grids of 12, 6 and 3 patches a side

_CLASSES = {"num_labels": NUM_CLASSES}
# Grids of 5 and 3: pixels, windows and the merging of patches are padded.
_ODD_GRIDS = {**_CLASSES, "patch_size": 5, "depths": [2, 3], "num_heads": [4, 8]}


def _like_swin(prefix: str, **options: Any) -> Family:
    return Family(
        config_class=f"{prefix}Config",
        config={
            "embed_dim": 16,
            "depths": [1, 2, 2],
            "num_heads": [4, 8, 8],
            "window_size": 3,
            "mlp_ratio": 1.7,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "encoder_stride": PATCH_SIZE * 4,
            "num_channels": CHANNELS,
        },
        heads={
            "image": Head(f"{prefix}ForImageClassification", of_samples(), _CLASSES),
            "odd_grids": Head(f"{prefix}ForImageClassification", of_samples(), _ODD_GRIDS),
            "masked_image": Head(f"{prefix}ForMaskedImageModeling", masked_patches(IMAGE_SIZE // PATCH_SIZE)),
            "bare": Head(f"{prefix}Model", no_labels, criterion=mean_features),
            "backbone": Head(
                f"{prefix}Backbone", no_labels, {"out_indices": [1, 3]}, criterion=mean_feature_maps, layout="tp2"
            ),
        },
        inputs=images(IMAGE_SIZE),
        attention_dropout="attention_probs_dropout_prob",
        sequence_parallel=False,
        **options,
    )


SWIN = _like_swin("Swin", attention_output="attention.o_proj")
SWINV2 = _like_swin("Swinv2", attention_output="attention.output.dense", attention_by_hand=True)

FAMILIES = {"swin": SWIN, "swinv2": SWINV2}
