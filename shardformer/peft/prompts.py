"""Virtual tokens that peft's prompt tuning puts in front of every sequence."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.loss.terms import IGNORE_INDEX, HeadLoss, LossTerm
from shardformer.peft.kinds import adapter_configs, is_a, kind_of


def task_of(config: Any) -> str | None:
    """Return peft's name of the task of an adapter: such as 'CAUSAL_LM' or 'SEQ_CLS'."""
    return None if config.task_type is None else str(getattr(config.task_type, "value", config.task_type))


def prompt_config(model: nn.Module) -> Any:
    """Return the configuration of the active adapter if it puts virtual tokens, or a prefix, in front of sequences."""
    active = getattr(model, "active_adapter", None) if is_a(model, "model") else None
    config = adapter_configs(model).get(active) if isinstance(active, str) else None
    return config if config is not None and config.is_prompt_learning else None


def behind_prompts(model: nn.Module, head_loss: HeadLoss | None) -> HeadLoss | None:
    """Adapt a head's loss to outputs that start with those of virtual tokens, which have no labels.

    Prefixes are keys and values of attention and have no outputs; a classifier's outputs are per sequence.
    """
    config = prompt_config(model)
    has_outputs = config is not None and kind_of(config) != "PREFIX_TUNING"
    if head_loss is None or not has_outputs or task_of(config) != "CAUSAL_LM":
        return head_loss
    behind = copy.copy(head_loss)
    behind.terms = tuple(_behind(term, config.num_virtual_tokens) for term in head_loss.terms)
    return behind


def _behind(term: LossTerm, length: int) -> LossTerm:
    def prepare(labels: Tensor, batch: Any) -> Tensor:
        labels = F.pad(labels, (length, 0), value=IGNORE_INDEX)
        return labels if term.prepare is None else term.prepare(labels, batch)

    return replace(term, prepare=prepare)
