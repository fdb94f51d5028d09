"""Entries of a batch that list the patches of all images one after the other, as Qwen-VL and GLM-V take them.

`pixel_values` is [patches of all images, features], and `image_grid_thw`, [images, 3], has the numbers of patches over
time, height and width; `pixel_values_videos` and `video_grid_thw` are the same of videos. A sample has any number of
images, in the order of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError

# Entry of patches -> entry of grids, and what `mm_token_type_ids` has at their tokens.
_LISTED = {"pixel_values": ("image_grid_thw", 1), "pixel_values_videos": ("video_grid_thw", 2)}

# Families (`model_type`) in which the position of an image's tokens has its number in the batch, not in the sample.
_NUMBER_IMAGES = ("hunyuan_vl",)


def check_parts(model: nn.Module, batch: Mapping[str, Any], num_parts: int) -> None:
    """Refuse to cut the batch of a model whose positions would change with the parts.

    Raises:
        ConfigurationError: positions count the images of the whole batch.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if num_parts > 1 and model_type in _NUMBER_IMAGES and batch.get("image_grid_thw") is not None:
        raise ConfigurationError(
            f"{type(model).__name__} numbers the images of a whole batch in the positions of their tokens, which "
            f"{num_parts} micro-batches would begin anew; use num_microbatches=1, or batches without images"
        )


def pieces_of_patches(batch: Mapping[str, Any], rows: int, num_pieces: int) -> dict[str, list[Tensor]]:
    """Return the parts of the entries that list patches, for parts of the samples; empty if the batch has none.

    Args:
        rows: samples of the batch.
        num_pieces: number of parts, whose numbers of samples differ by at most one.

    Raises:
        ConfigurationError: the batch does not tell which image belongs to which sample.
    """
    found: dict[str, list[Tensor]] = {}
    for name, (grid_name, kind) in _LISTED.items():
        patches, grid = batch.get(name), batch.get(grid_name)
        if not isinstance(patches, Tensor) or not isinstance(grid, Tensor) or grid.dim() != 2:
            continue
        sizes = grid.prod(-1)  # patches of each image
        if int(sizes.sum()) != len(patches):
            continue
        images = _images_of_samples(batch.get("mm_token_type_ids"), kind, sizes, rows, grid_name)
        of_parts = [int(part.sum()) for part in images.tensor_split(num_pieces)]
        found[grid_name] = list(grid.split(of_parts))
        found[name] = list(patches.split([int(part.sum()) for part in sizes.split(of_parts)]))
    return found


def _images_of_samples(types: Any, kind: int, sizes: Tensor, rows: int, grid_name: str) -> Tensor:
    """Return the number of images of each sample, [rows].

    Args:
        types: [rows, seq], `kind` at the tokens of images; None if the batch has none.
        sizes: patches of each image, [images]; all become the same number of tokens a patch.
    """
    if isinstance(types, Tensor) and len(types) == rows and (types == kind).any():
        ends = (types == kind).sum(-1).cumsum(0) * int(sizes.sum()) // int((types == kind).sum())
        upto = torch.searchsorted(sizes.cumsum(0), ends, right=True)
        return upto.diff(prepend=upto.new_zeros(1))
    if len(sizes) == rows:
        return torch.ones(rows, dtype=torch.long)
    raise ConfigurationError(
        f"{grid_name} has {len(sizes)} entries for {rows} samples, and the batch does not tell to which they belong; "
        "give mm_token_type_ids, or use num_microbatches=1"
    )
