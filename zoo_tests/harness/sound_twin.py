"""SoundTwin: a tiny model of texts with sounds in its batches; those of `booster verify` have texts alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from plugins.hybrid_parallel.verify.tiny_model import TinyModel

_TOKEN, _TEXT = 97, 8  # in the vocabulary of tiny models; tokens of text behind those of a sound


@dataclass(frozen=True)
class SoundTwin(TinyModel):
    """A tiny model each of whose samples begins with a sound, as Voxtral takes it."""

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Make the global batch of a step; samples have different lengths."""
        generator = torch.Generator().manual_seed(77 + step)
        tower = model.config.audio_config
        sounds = torch.rand(rows, tower.num_mel_bins, 2 * tower.max_source_positions, generator=generator)
        sounds = self._cast(sounds)
        with torch.no_grad():
            count = model.get_audio_features(sounds).pooler_output.shape[:-1].numel() // rows
        ids = torch.randint(0, _TOKEN - 10, (rows, count + _TEXT), generator=generator)
        mask = torch.arange(count + _TEXT) < count + _TEXT - torch.arange(rows)[:, None] % 4
        ids[:, :count] = _TOKEN
        labels = ids.masked_fill(~mask | (ids == _TOKEN), -100)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels, "input_features": sounds}


def sound_twin_of(twin: TinyModel) -> SoundTwin:
    """The twin with sounds; a model of Voxtral's form."""
    config = type(twin.config).from_dict(twin.config.to_dict())
    config.audio_token_id = _TOKEN
    config.audio_config.intermediate_size = 4 * config.audio_config.hidden_size  # four frames become a token
    return SoundTwin(**{each.name: getattr(twin, each.name) for each in fields(TinyModel)} | {"config": config})
