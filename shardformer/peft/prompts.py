"""Virtual tokens that peft's prompt tuning puts in front of every sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import split_features
from shardformer.loss.terms import IGNORE_INDEX, HeadLoss, LossTerm
from shardformer.peft.kinds import adapter_configs, is_a, kind_of, model_inside
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.stages.stage import PipelineStageManager


def task_of(config: Any) -> str | None:
    """Return peft's name of the task of an adapter: such as 'CAUSAL_LM' or 'SEQ_CLS'."""
    return None if config.task_type is None else str(getattr(config.task_type, "value", config.task_type))


class PromptedEmbedding(nn.Module):
    """The embedding of a sharded model, as peft's prompt tuning calls it before the model.

    On later stages of a pipeline peft puts virtual tokens in front of zeros: only the shape of that is used.

    Args:
        model: the transformers model, which is no sub-module of this one.
        path: path of the embedding in it.
        width: features of a token; models may project them to the width of their layers.
    """

    def __init__(self, model: nn.Module, path: str, width: int) -> None:
        super().__init__()
        self._place, self.width = (model, path), width

    @property
    def _embedding(self) -> nn.Module:
        """The embedding, or the placeholder of it or of a module around it, such as BERT's `embeddings`."""
        found, path = self._place
        for name in path.split("."):
            found = found if isinstance(found, StagePlaceholder) else getattr(found, name)
        return found

    @property
    def weight(self) -> Tensor:
        """The weight of the embedding, of which peft reads the device."""
        return self._embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [batch, seq] -> [batch, seq, width]."""
        embedding = self._embedding
        if not isinstance(embedding, StagePlaceholder):
            return embedding(ids)
        return embedding.stage_input.dummy().new_zeros(*ids.shape, self.width)


@contextmanager
def prompts_followed(model: nn.Module, config: ShardConfig, policy: Policy) -> Iterator[None]:
    """Let peft's virtual tokens follow the model, which is sharded in this context.

    Tokens are looked up in what replaces the embedding, and prefixes are those of this rank's heads.

    Raises:
        ValueError: this model's attention has no heads of its own on each rank; nothing is changed then.
    """
    inside, own = model_inside(model), getattr(model, "word_embeddings", None) if is_a(model, "model") else None
    path = next((path for path, module in inside.named_modules() if module is own), None)
    has_prefixes = any(kind_of(each) == "PREFIX_TUNING" for each in adapter_configs(model).values())
    if has_prefixes and config.tensor_parallel_size > 1:
        if config.uses_ulysses or not policy.cuts_attention:
            raise ValueError(
                "peft's PREFIX_TUNING needs keys and values of whole sequences and of this rank's heads, which "
                f"tp_size={config.tensor_parallel_size} does not leave a {type(inside).__name__} here; use "
                "sequence_parallelism_mode='split_gather', tp_size=1 (dp, pp work), or LORA"
            )
        model.get_prompt = partial(_of_local_heads, model.get_prompt, inside, config.group)
    yield
    if path is not None:
        model.word_embeddings = PromptedEmbedding(inside, path, own.weight.shape[-1])


def _of_local_heads(
    get_prompt: Callable[..., Any], model: nn.Module, group: ProcessGroup, *args: Any, **kwargs: Any
) -> Any:
    """Take this rank's heads of each layer's keys and values in a cache; virtual tokens stay as they are.

    Layers whose attention gathers all heads on each rank (Phi-3) take all.
    """
    prompt = get_prompt(*args, **kwargs)
    whole = {each.layer_idx for each in model.modules() if getattr(each, "attention_is_replicated", False)}
    for index, layer in enumerate(getattr(prompt, "layers", ())):
        if index not in whole:
            layer.keys, layer.values = (_local_heads(each, group) for each in (layer.keys, layer.values))
    return prompt


def _local_heads(states: Tensor, group: ProcessGroup) -> Tensor:
    """Cut [batch, heads, virtual tokens, head_dim] like the heads of a projection of keys."""
    heads, size = states.shape[1], dist.get_world_size(group)
    spec = ShardSpec((heads,), 0, (Part(heads),), dist.get_rank(group), size, max(1, size // heads))
    return split_features(states.movedim(1, -1), spec, group).movedim(-1, 1)


def prompts_on_stages(model: nn.Module, stages: PipelineStageManager) -> list[dict[int, Tensor]]:
    """Return the parameters of virtual tokens, which all stages hold: stage -> parameter, or meta tensors elsewhere."""
    if not is_a(model, "model") or stages.num_stages == 1:
        return []
    encoders = nn.ModuleList(module for module in model.modules() if is_a(module, "prompt encoder"))
    here, elsewhere = stages.held, torch.empty(0, device="meta")
    return [
        {stage: parameter if stage in here else elsewhere for stage in range(stages.num_stages)}
        for parameter in encoders.parameters()
    ]


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
