"""SoundTwin: a tiny model of texts with sounds in its batches; those of `booster verify` have texts alone."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.verify.image_twin import NoMediaError, brief, image_twin_of, in_some
from plugins.hybrid_parallel.verify.tiny_model import TinyModel

_TOKEN, _TEXT = 97, 8  # in the vocabulary of tiny models; tokens of text behind those of a sound
_NAMES = ("audio_token_id", "audio_token_index")
_BINS = ("num_mel_bins", "n_mels", "input_dim", "input_size")
_MOST_TOKENS = 34
_FRAMES = 32  # of a sound, where the configuration does not say
_MASKS = ("input_features_mask", "feature_attention_mask")


@dataclass(frozen=True)
class SoundTwin(TinyModel):
    """A tiny model each of whose samples begins with a sound.

    Attributes:
        bins_first: whether a sound is [bins, frames] or [frames, bins].
        tokens: that a sound becomes.
        in_some: as in `ImageTwin`.
    """

    bins_first: bool = True
    tokens: int = 1
    in_some: bool = False

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Make the global batch of a step; samples have different lengths."""
        generator = torch.Generator().manual_seed(77 + step)
        sounds, count = self._sounds(model, rows, generator), self.tokens
        numbers = in_some(rows, sounds) if self.in_some else [1] * rows
        length = max(numbers) * (count + 1) - 1 + _TEXT
        ids = torch.randint(0, _TOKEN - 10, (rows, length), generator=generator)
        mask = torch.arange(length) < length - torch.arange(rows)[:, None] % 4
        place, given = torch.arange(length), torch.tensor(numbers)[:, None]
        ids.masked_fill_((place < given * (count + 1)) & (place % (count + 1) < count), _TOKEN)  # text is between two
        labels = ids.masked_fill(~mask | (ids == _TOKEN), -100)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels, **sounds}

    def _sounds(self, model: nn.Module, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        tower = model.config.audio_config if hasattr(model.config, "audio_config") else model.config.encoder_config
        bins = next(getattr(tower, name) for name in _BINS if hasattr(tower, name))
        frames = frames_of(tower)
        shape = (bins, frames) if self.bins_first else (frames, bins)
        sounds = {"input_features": torch.rand(rows, *shape, generator=generator).to(self.dtype)}
        masks = [name for name in _MASKS if name in inspect.signature(model.forward).parameters]
        return sounds | {name: torch.ones(rows, frames, dtype=torch.long) for name in masks}


def media_twin_of(twin: TinyModel) -> TinyModel:
    """The twin with images, or with sounds where it takes none.

    Raises:
        NoMediaError: it takes neither.
    """
    try:
        return image_twin_of(twin)
    except NoMediaError as images:
        try:
            return sound_twin_of(twin)
        except NoMediaError as sounds:
            raise NoMediaError(f"{images}; {sounds}") from None


def sound_twin_of(twin: TinyModel) -> SoundTwin:
    """The twin with sounds in the form in which they reach the loss.

    Raises:
        NoMediaError: there is none; it names the errors.
    """
    reasons = {}
    config = type(twin.config).from_dict(twin.config.to_dict())
    for name in _NAMES:
        if hasattr(config, name):
            setattr(config, name, _TOKEN)
    if hasattr(getattr(config, "audio_config", None), "intermediate_size"):
        config.audio_config.intermediate_size = 4 * config.audio_config.hidden_size  # four frames become a token
    given = {each.name: getattr(twin, each.name) for each in fields(TinyModel)} | {"config": config}
    for bins_first in (True, False):
        found = SoundTwin(**given, bins_first=bins_first)
        model = found.build()
        for tokens in range(1, _MOST_TOKENS):
            counted = replace(found, tokens=tokens)
            try:
                model(**counted.batch(model, 0, 2)).loss.backward()
            except Exception as error:  # forwards raise arbitrary exception types
                reasons[re.sub(r"\d+", "*", brief(error))] = None
                continue
            if any(parameter.grad is not None and parameter.grad.any() for parameter in _of_projections(model)):
                return counted
            reasons["sounds do not reach the loss"] = None
    raise NoMediaError(f"no batch of sounds was found that it takes ({'; '.join(reasons)})")


def frames_of(tower: Any) -> int:
    """Number of frames of a sound: as many as a tower with a table of positions has, or one of its windows."""
    if hasattr(tower, "n_window"):
        return 2 * tower.n_window
    return 2 * getattr(tower, "max_source_positions", _FRAMES // 2)


def _of_projections(model: nn.Module) -> list[nn.Parameter]:
    names = ("projector", "projection", "audio", "adaptor")
    towers = [module for name, module in model.named_modules() if any(each in name.split(".")[-1] for each in names)]
    return [parameter for tower in towers for parameter in tower.parameters()]
