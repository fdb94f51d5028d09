"""Tiny models of texts with images in their batches; those of `TinyModel` have texts alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.verify.random_batch import cast
from plugins.hybrid_parallel.verify.tiny_model import TinyModel

_TOKEN, _TEXT = 98, 8  # in the vocabulary of tiny models; tokens of text behind those of an image
_NAMES = ("image_token_id", "image_token_index")
# Features that a tower and its projection give.
_OUT = (
    "out_hidden_size",
    "projection_dim",
    "output_dim",
    "vision_output_dim",
    "projector_input_dim",
    "projector_output_dim",
)
_GRID = (1, 4, 4)  # patches of an image over time, height and width
_SIZE, _PATCH = 32, 4  # of images whose size, or whose patches' size, the configuration does not say

Images = Callable[[Any, int, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class ImageTwin(TinyModel):
    """Tiny model each of whose samples begins with an image."""

    style: str = "pictures"  # name of the form in which the class takes images, one of `STYLES`
    # whether the first half of the samples has none, and the last one two, where a sample may have several
    in_some: bool = False

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Make the global batch of a step; samples have different lengths."""
        generator = torch.Generator().manual_seed(77 + step)
        images = cast(STYLES[self.style](model.config.vision_config, rows, generator), self.dtype)
        count = _tokens_of(model, images) // rows
        numbers = in_some(rows, images) if self.in_some else [1] * rows
        ids = torch.randint(0, _TOKEN - 10, (rows, max(numbers) * (count + 1) - 1 + _TEXT), generator=generator)
        mask = torch.ones_like(ids)
        for row, number in enumerate(numbers):
            mask[row, ids.shape[1] - row % 4 :] = 0
            for start in range(0, number * (count + 1), count + 1):  # text is between two images
                ids[row, start : start + count] = _TOKEN
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < _TOKEN:  # heads that pool the last token look for it
            ids.masked_fill_(mask == 0, padding)
        labels = super().batch(model, step, rows)["labels"]
        if labels.dim() > 1:  # of tokens
            classes = model.config.num_labels if "TokenClassification" in type(model).__name__ else _TOKEN
            labels = (ids % classes).masked_fill((mask == 0) | (ids == _TOKEN), -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, **images}
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            batch["mm_token_type_ids"] = (ids == _TOKEN).long()
        return batch


def in_some(rows: int, media: dict[str, Tensor]) -> list[int]:
    """Return the numbers of images or sounds of samples, half of which have none; `media` has those of others alone."""
    without = (rows + 1) // 2
    values = next(iter(media.values()))
    if values.dim() == 5 and len(media) == 1 or "pixel_attention_mask" in media and values.dim() == 5:
        values[:without] = 0  # each sample has a row of images, and blank ones are padding
        return [0] * without + [1] * (rows - without)
    listed = rows - without + 1
    for name, value in media.items():
        media[name] = value[: len(value) // rows * listed]
    return [0] * without + [1] * (rows - without - 1) + [2]


class NoMediaError(ValueError):
    """Says why no batch of images or sounds reaches the loss of a model."""


def image_twin_of(twin: TinyModel) -> ImageTwin:
    """Return the twin with images as they reach the loss first; NoMediaError names each style's error."""
    reasons = {}
    for style in STYLES:
        config = type(twin.config).from_dict(twin.config.to_dict())
        fit_towers(config)
        given = {each.name: getattr(twin, each.name) for each in fields(TinyModel)} | {"config": config}
        found = ImageTwin(**given, style=style)
        try:
            model = found.build()
            model(**found.batch(model, 0, 2)).loss.backward()
        except Exception as error:  # forwards raise arbitrary exception types
            reasons[brief(error)] = None
            continue
        if any(module.weight.grad is not None and module.weight.grad.any() for module in _projections_of_towers(model)):
            return found
        reasons["images do not reach the loss"] = None
    raise NoMediaError(f"no batch of images was found that it takes ({'; '.join(reasons)})")


def brief(error: Exception) -> str:
    """Return the type and the first words of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"


def fit_towers(config: Any) -> None:
    """Let images have a token, and let the sizes of towers fit those of the text; tiny models shrink each by itself."""
    for name in _NAMES:
        if hasattr(config, name):
            setattr(config, name, _TOKEN)
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return
    text = config.get_text_config()
    for owner in (vision, config):
        for name in _OUT:
            if isinstance(getattr(owner, name, None), int):
                setattr(owner, name, text.hidden_size)
    if hasattr(config, "mm_tokens_per_image"):  # pooled from 4 x 4 patches
        config.mm_tokens_per_image = 4
    if hasattr(config, "image_grid_pinpoints"):  # one tile and the whole image
        config.image_grid_pinpoints = [[vision.image_size] * 2]
    if hasattr(config, "vision_feature_layers"):
        config.vision_feature_layers = [-1, -2]
    if hasattr(vision, "pixel_shuffle_ratio"):
        vision.intermediate_size = int(vision.hidden_size / vision.pixel_shuffle_ratio**2)


def _projections_of_towers(model: nn.Module) -> list[nn.Module]:
    names = ("vision", "visual", "image")
    towers = [module for name, module in model.named_modules() if any(each in name.split(".")[-1] for each in names)]
    return [module for tower in towers for module in tower.modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def _tokens_of(model: nn.Module, images: dict[str, Tensor]) -> int:
    """Count the tokens that images become."""
    owner = model if hasattr(model, "get_image_features") else model.base_model
    with torch.no_grad():
        found = owner.get_image_features(**images)
    states = getattr(found, "pooler_output", found)
    states = found.last_hidden_state if states is None else states
    if states is None:  # features of layers of text, with their numbers
        states = found.deepstack_features[0][1]
    parts = [states] if isinstance(states, Tensor) else list(states)
    return sum(part.shape[:-1].numel() for part in parts)


def _sides(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", _SIZE)
    return (size, size) if isinstance(size, int) else tuple(size)


def _pictures(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.rand(rows, channels, *_sides(config), generator=generator)}


def _sized_pictures(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    return _pictures(config, rows, generator) | {"image_sizes": torch.tensor([_sides(config)] * rows)}


def _tiled_pictures(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    whole = _sized_pictures(config, rows, generator)
    tile = _pictures(config, rows, generator)["pixel_values"]
    return whole | {"pixel_values": torch.stack([whole["pixel_values"], tile], 1)}


def _listed_pictures(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": _pictures(config, rows, generator)["pixel_values"][:, None]}


def _masked_tiles(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    return _listed_pictures(config, rows, generator) | {"pixel_attention_mask": torch.ones(rows, 1, dtype=torch.bool)}


def _frames(config: Any) -> int:
    """Return the number of frames in a patch."""
    return getattr(config, "temporal_patch_size", None) or getattr(config, "patch_temporal", 1)


def _patches(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    side = getattr(config, "patch_size", _PATCH)
    features = getattr(config, "in_channels", 3) * _frames(config) * side**2
    number = rows * _GRID[0] * _GRID[1] * _GRID[2]
    return {
        "pixel_values": torch.rand(number, features, generator=generator),
        "image_grid_thw": torch.tensor([_GRID] * rows),
    }


def _merged_patches(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    return _patches(config, rows, generator) | {"image_merge_sizes": torch.tensor([2] * rows)}


def _square_patches(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    patches, side = _patches(config, rows, generator), config.patch_size
    return patches | {"pixel_values": patches["pixel_values"].unflatten(1, (-1, side, side))}


def _padded_patches(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    _, height, width = _GRID
    features = getattr(config, "num_channels", 3) * config.patch_size**2
    return {
        "pixel_values": torch.rand(rows, height * width, features, generator=generator),
        "spatial_shapes": torch.tensor([[height, width]] * rows),
        "pixel_attention_mask": torch.ones(rows, height * width, dtype=torch.long),
    }


STYLES: dict[str, Images] = {
    "pictures": _pictures,
    "sized pictures": _sized_pictures,
    "tiled pictures": _tiled_pictures,
    "a list of pictures": _listed_pictures,
    "tiles with a mask": _masked_tiles,
    "patches": _patches,
    "patches that are merged": _merged_patches,
    "square patches": _square_patches,
    "padded patches": _padded_patches,
}
