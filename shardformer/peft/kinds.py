"""Peft's parts in a model, found by peft's own classes, and prompts that it puts before the tokens."""

from __future__ import annotations

import copy
import sys
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
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import Part, ShardSpec
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.stages.stage import PipelineStageManager

_CLASSES = {
    "model": ("peft.peft_model", "PeftModel"),
    "mixed model": ("peft.mixed_model", "PeftMixedModel"),
    "tuner": ("peft.tuners.tuners_utils", "BaseTuner"),
    "layer": ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    "lora linear": ("peft.tuners.lora.layer", "Linear"),
    "lora embedding": ("peft.tuners.lora.layer", "Embedding"),
    "lora parameter": ("peft.tuners.lora.layer", "ParamWrapper"),
    "dora": ("peft.tuners.lora.variants", "DoraLinearVariant"),
    "lora 4-bit linear": ("peft.tuners.lora.bnb", "Linear4bit"),
    "lora 8-bit linear": ("peft.tuners.lora.bnb", "Linear8bitLt"),
    "lora torchao linear": ("peft.tuners.lora.torchao", "TorchaoLoraLinear"),
    "ia3 linear": ("peft.tuners.ia3.layer", "Linear"),
    "ia3 4-bit linear": ("peft.tuners.ia3.bnb", "Linear4bit"),
    "ia3 8-bit linear": ("peft.tuners.ia3.bnb", "Linear8bitLt"),
    "prompt encoder": ("peft.tuners.tuners_utils", "BasePromptEncoder"),
    "wrapper": ("peft.utils.other", "AuxiliaryTrainingWrapper"),
    "copied module": ("peft.utils.other", "ModulesToSaveWrapper"),
    "trainable tokens": ("peft.utils.other", "TrainableTokensWrapper"),
}

LORA_LINEAR = ("lora linear", "lora 4-bit linear", "lora 8-bit linear", "lora torchao linear")
IA3_LINEAR = ("ia3 linear", "ia3 4-bit linear", "ia3 8-bit linear")


def peft_class(kind: str) -> type | None:
    """Return a class of peft; None if peft's module is not imported."""
    module, name = _CLASSES[kind]
    return getattr(sys.modules.get(module), name, None)


def is_a(value: Any, kind: str) -> bool:
    """Return whether `value` is an instance of that class of peft, or of a subclass."""
    cls = peft_class(kind)
    return cls is not None and isinstance(value, cls)


def is_exactly(value: Any, *kinds: str) -> bool:
    """Return whether the type of `value` is exactly one of these of peft; a subclass may compute differently."""
    return type(value) in [peft_class(kind) for kind in kinds]


def model_inside(model: nn.Module) -> nn.Module:
    """Return the transformers model inside peft's wrappers; the model itself if there are none."""
    return model.get_base_model() if is_a(model, "model") else model


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return name -> configuration of the adapters, including those added by transformers' `model.add_adapter`."""
    return dict(getattr(model, "peft_config", {})) if peft_class("model") is not None else {}


def kind_of(config: Any) -> str:
    """Return peft's name of a kind of adapter: such as 'LORA' or 'IA3'."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module of peft) for everything in `model` that wraps a module of the model, outermost first."""
    for path, module in model.named_modules():
        is_layer = is_a(module, "layer") and isinstance(getattr(module, "base_layer", None), nn.Module)
        if (is_layer and not path.endswith(".token_adapter")) or is_a(module, "wrapper"):
            yield path, module


def is_adapter_part(module: nn.Module) -> bool:
    """Return whether a module has an adapter's parameters: a layer, a wrapper or an encoder of virtual tokens."""
    return any(is_a(module, kind) for kind in ("layer", "wrapper", "prompt encoder"))


def inner_module(wrapped: nn.Module) -> nn.Module:
    """Return the module of the model that a module of peft wraps."""
    return wrapped.original_module if is_a(wrapped, "wrapper") else wrapped.base_layer


def put_inside(wrapped: nn.Module, module: nn.Module) -> None:
    """Set the module that a module of peft wraps."""
    if is_a(wrapped, "trainable tokens"):
        wrapped.token_adapter.base_layer = module
    elif is_a(wrapped, "wrapper"):
        wrapped.original_module = module
    else:
        wrapped.base_layer = module


def name_of(wrapped: nn.Module) -> str:
    """Return a readable name of a class of peft: such as 'lora.Linear' or 'lokr.Linear'."""
    cls = type(wrapped)
    parts = cls.__module__.split(".")
    return f"{parts[2]}.{cls.__name__}" if parts[:2] == ["peft", "tuners"] else cls.__name__


def task_of(config: Any) -> str | None:
    """Return peft's name of the task of an adapter: such as 'CAUSAL_LM' or 'SEQ_CLS'."""
    return None if config.task_type is None else str(getattr(config.task_type, "value", config.task_type))


class PromptedEmbedding(nn.Module):
    """The embedding of a sharded model, as peft's prompt tuning calls it before the model.

    On later stages of a pipeline peft puts virtual tokens in front of zeros: only the shape of that is used.

    Args:
        model: the transformers model, which is no sub-module of this one.
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
    """Take this rank's heads of a cache, of virtual tokens; all where attention gathers all heads (Phi-3)."""
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


def virtual_tokens(model: nn.Module) -> int:
    """Return how many tokens the active adapter puts in front of each sequence; 0 while it is disabled."""
    config = prompt_config(model)
    return 0 if config is None or model._adapters_disabled else config.num_virtual_tokens


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
