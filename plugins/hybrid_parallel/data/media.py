"""Entries of a batch that list the images, videos or sounds of all samples one after the other.

A sample has any number of them, in the order of the samples, and its text has tokens in their places. Qwen-VL and GLM-V
list the patches: `pixel_values` is [patches of all images, features], and `image_grid_thw`, [images, 3], has the
numbers of patches over time, height and width. Other families list whole images, or sounds, [images, ...].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError


@dataclass(frozen=True)
class _Kind:
    """A kind of media."""

    values: tuple[str, ...]  # names of its main entry
    grid: str  # name of the entry that tells the patches in the main one, [items, 3]
    sizes: tuple[str, ...]  # names of entries by which the numbers of tokens of items may differ, [items, ...]
    others: tuple[str, ...]  # further entries with a row for each item, or for each patch
    number: int  # what `mm_token_type_ids` has at its tokens
    token: str  # beginning of the name of its token in configurations


_KINDS = (
    _Kind(
        ("pixel_values", "image_pixel_values"),
        "image_grid_thw",
        ("image_sizes", "spatial_shapes"),
        ("image_merge_sizes", "pixel_mask", "pixel_attention_mask", "image_position_ids", "high_res_pixel_values"),
        1,
        "image_token",
    ),
    _Kind(
        ("pixel_values_videos",),
        "video_grid_thw",
        ("image_sizes_videos",),
        ("video_merge_sizes", "video_compression_mask", "second_per_grid_ts", "video_second_per_grid")
        + ("num_frames_per_video", "video_position_ids"),
        2,
        "video_token",
    ),
    _Kind(
        ("input_features", "audio_input_features"),
        "",
        ("feature_attention_mask", "input_features_mask", "audio_attention_mask"),
        ("audio_embed_sizes", "audio_feature_lengths"),
        3,
        "audio_token",
    ),
)
_NAMES = {name for kind in _KINDS for name in (*kind.values, kind.grid, *kind.sizes, *kind.others)}


def media_tokens(model: nn.Module) -> dict[str, int]:
    """Return the ids of the tokens that stand for media in the texts of a model: main entry -> id."""
    config = getattr(model, "config", None)
    found = {}
    for kind in _KINDS:
        ids = [getattr(config, f"{kind.token}_{end}", None) for end in ("id", "index")]
        found |= {name: each for each in ids if isinstance(each, int) for name in kind.values}
    return found


def parameters_of_texts(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that texts alone use; none where the model does not tell which these are."""
    config, decoder = getattr(model, "config", None), getattr(model, "get_decoder", lambda: None)()
    is_text = decoder is not None and config is not None and decoder.config is config.get_text_config(decoder=True)
    if not is_text or decoder.config is config:
        return set()
    modules = [decoder, model.get_input_embeddings(), model.get_output_embeddings()]
    return {param for module in modules if module is not None for param in module.parameters()}


def without_media(batch: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return a batch without images, videos and sounds, of a model whose texts have these `tokens` in their places."""
    return {name: value for name, value in batch.items() if not tokens or not is_media(name)}


def without_empty_media(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out lists of no item in a batch of texts, of which another share may have some: towers need one to run."""
    none = {name for name, value in batch.items() if is_media(name) and isinstance(value, Tensor) and not value.numel()}
    return {name: value for name, value in batch.items() if name not in none}


def is_media(name: str) -> bool:
    """Return whether an entry tells of images, videos or sounds, of which a batch may have none."""
    return name in _NAMES


def kinds_of_media(batch: Mapping[str, Any]) -> list[bool]:
    """Return which kinds of media a batch has."""
    return [any(batch.get(name) is not None for name in kind.values) for kind in _KINDS]


def parts_of_media(
    batch: Mapping[str, Any], rows: int, num_parts: int, tokens: Mapping[str, int]
) -> dict[str, list[Tensor | None]]:
    """Return the parts of the entries that list media, for parts of the samples; empty if the batch has none.

    A part without any is None: models run their towers on what they are given, and none of them on nothing.

    Args:
        num_parts: number of parts, whose numbers of samples differ by at most one.
        tokens: main entry -> id of the tokens that stand for it.

    Raises:
        ConfigurationError: the batch does not tell which image belongs to which sample.
    """
    found: dict[str, list[Tensor | None]] = {}
    for kind in _KINDS:
        name = next((name for name in kind.values if isinstance(batch.get(name), Tensor)), None)
        items = None if name is None else _Items.of(kind, name, batch, rows)
        marks = None if items is None else _marks(kind, name, batch, rows, tokens)
        has_patches = items is not None and batch.get(kind.grid) is not None and items.has_patches
        if items is None or (marks is None and not has_patches):
            continue
        of_parts = [int(part.sum()) for part in items.of_samples(marks, rows).tensor_split(num_parts)]
        of_patches = [int(part.sum()) for part in items.patches.split(of_parts)]
        for entry, value in items.entries(batch):
            pieces = value.split(of_patches if len(value) == sum(of_patches) else of_parts)
            found[entry] = [piece if len(piece) else None for piece in pieces]
    return found


@dataclass(frozen=True)
class _Items:
    """The images, videos or sounds of a batch."""

    kind: _Kind  # of these
    name: str  # of the main entry
    patches: Tensor  # rows of the main entry of each item, [items]
    sizes: Tensor  # numbers in proportion to the tokens of each item, [items], as far as entries tell

    @property
    def has_patches(self) -> bool:
        return bool(self.kind.grid) and bool((self.patches != 1).any())

    @staticmethod
    def of(kind: _Kind, name: str, batch: Mapping[str, Any], rows: int) -> _Items | None:
        """Return the items of a batch; None if its entries have a row for each sample."""
        values, grid = batch[name], batch.get(kind.grid)
        if isinstance(grid, Tensor) and grid.dim() == 2:
            patches = grid.cpu().prod(-1)
            merged = batch.get(kind.grid.replace("grid_thw", "merge_sizes"))
            sizes = patches // merged.cpu() ** 2 if isinstance(merged, Tensor) else patches
            return _Items(kind, name, patches, sizes) if int(patches.sum()) == len(values) else None
        number = len(values) if values.dim() else 0
        told = next((batch[each] for each in kind.sizes if isinstance(batch.get(each), Tensor)), None)
        if told is None or len(told) != number:
            sizes = torch.ones(number, dtype=torch.long)
        else:  # heights and widths, or masks of frames
            sizes = (told.prod(-1) if told.shape[-1] == 2 else told.flatten(1).sum(-1)).long().cpu()
        # Idefics and Mllama pad the images of a sample, [samples, images, ...]; LLaVA-NeXT tells sizes of tiled ones.
        if number == rows and kind.number == 1 and values.dim() > 4 and told is None:
            return None
        return _Items(kind, name, torch.ones(number, dtype=torch.long), sizes)

    def entries(self, batch: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries that have a row for each item, or for each patch."""
        for name in (self.name, self.kind.grid, *self.kind.sizes, *self.kind.others):
            value = batch.get(name)
            if isinstance(value, Tensor) and value.dim() and len(value) in (len(self.patches), int(self.patches.sum())):
                yield name, value

    def of_samples(self, marks: Tensor | None, rows: int) -> Tensor:
        """Return the items of each sample, [rows]; `marks`: [rows, seq], where a token is one; None if unknown."""
        if marks is not None:
            ends, bounds = marks.sum(-1).cumsum(0) * int(self.sizes.sum()), self.sizes.cumsum(0) * int(marks.sum())
            if torch.isin(ends, torch.cat([bounds.new_zeros(1), bounds])).all():
                upto = torch.searchsorted(bounds, ends, right=True)
                return upto.diff(prepend=upto.new_zeros(1))
            spans = (marks & ~marks.roll(1, -1).index_fill(-1, torch.tensor(0), False)).sum(-1)
            if int(spans.sum()) == len(self.sizes):  # the tokens of an item follow one another
                return spans
        elif len(self.sizes) == rows:
            return torch.ones(rows, dtype=torch.long)
        name = self.kind.grid if self.has_patches else self.name
        raise ConfigurationError(
            f"{name} has {len(self.sizes)} entries for {rows} samples, and the batch does not tell to which they "
            "belong; give mm_token_type_ids, or use num_microbatches=1"
        )


def _marks(kind: _Kind, name: str, batch: Mapping[str, Any], rows: int, tokens: Mapping[str, int]) -> Tensor | None:
    """Return which tokens stand for a kind of media, [rows, seq] on the host; None if none is found."""
    ids = batch.get("input_ids")
    types = batch.get("mm_token_type_ids")
    for value, mark in ((types, kind.number), (ids, tokens.get(name))):
        if isinstance(value, Tensor) and value.dim() == 2 and len(value) == rows and mark is not None:
            marks = (value == mark).cpu()
            if marks.any():
                return marks
    return None
