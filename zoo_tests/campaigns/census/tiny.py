"""A tiny model of any head class: the twin that `booster verify` makes, with all sizes from its table."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from plugins.hybrid_parallel.verify.tiny_model import TwinSizes, build_small, small_config
from zoo_tests.campaigns.census.classes import HeadClass

# Windows also where a family's own configuration has none.
_SIZES = TwinSizes(kv_heads=4, is_faithful=False)


def build(head: HeadClass) -> nn.Module:
    """The model, always the same, in training mode; fp32."""
    model_class = getattr(importlib.import_module(head.module), head.name)
    return build_small(model_class, small_config(model_class.config_class(), _SIZES), torch.float32)
