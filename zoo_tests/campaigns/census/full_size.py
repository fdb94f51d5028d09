"""What tensor parallelism divides of a class at the sizes of its default configuration, without memory or ranks."""

from __future__ import annotations

import importlib

import torch

from plugins.hybrid_parallel.verify.propose import share_cut
from zoo_tests.campaigns.census.classes import HeadClass

_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # layers that are skipped cannot be sharded


def full_size_share(head: HeadClass) -> float | None:
    """Share of the parameters that two tensor-parallel ranks divide; None if the class does not build so, or has heads
    that two does not divide."""
    try:
        model_class = getattr(importlib.import_module(head.module), head.name)
        config = model_class.config_class()
        for name in _AT_RANDOM:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        with torch.device("meta"):
            model = model_class(config)
        return share_cut(lambda: model, None).parameters
    except Exception:  # any of a thousand classes may fail in its own way
        return None
