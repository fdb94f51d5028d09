"""Implement `tie_first`: wrap a bare base model in its family's causal language model with a tied head.

The logits are then computed on the last stage with a weight that is tied to the embedding of the first stage. The
engine's usual support for tied weights keeps both in sync.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.compat.deepspeed_3d.logits import LogitHelper

_logger = get_logger(__name__)


def with_tied_head(model: nn.Module, logit_helper: LogitHelper | None) -> nn.Module:
    """Wrap a bare base model in its family's causal language model; return any other model unchanged.

    A model that already has a head keeps it, tied or not.

    Args:
        model: the model.
        logit_helper: computes the logits of the tied head; None for the family's own computation.

    Raises:
        ConfigurationError: the family has no head that consists only of the embedding, or `logit_helper` was given for
            a model that is not bare.
    """
    if is_bare(model):
        return _causal_model(model)
    name = type(model).__name__
    if logit_helper is not None:
        raise ConfigurationError(
            f"logit_helper computes logits from the input embedding, and {name} is no base model of transformers "
            "without a head; use logit_helper=None, or boost the base model alone"
        )
    _logger.info("tie_first changes nothing: %s is no base model of transformers without a head", name)
    return model


def is_bare(model: nn.Module) -> bool:
    """Check whether this is a base model of transformers without a head, such as `LlamaModel`."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel) and model.base_model is model and model.get_output_embeddings() is None


def _causal_model(base: nn.Module) -> nn.Module:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name, embedding = type(base).__name__, base.get_input_embeddings()
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(base.config), None)
    if cls is None or not isinstance(embedding, nn.Embedding):
        raise ConfigurationError(
            f"tie_first=True finds no causal language model of the family of {name}; use tie_first=False, where "
            "loss_func gets the hidden states"
        )
    config = copy.deepcopy(base.config)
    config.tie_word_embeddings = True
    with torch.device("meta"):  # only shapes are needed: weights outside of the base model are refused or tied
        whole = cls(config)
    prefix = cls.base_model_prefix
    if type(getattr(whole, prefix, None)) is not type(base):
        raise ConfigurationError(
            f"tie_first=True: {cls.__name__} is not built around a {name}; boost a {cls.__name__}, or use "
            "tie_first=False"
        )
    setattr(whole, prefix, base)
    head = whole.get_output_embeddings()
    own = [key for key, tensor in _own_tensors(whole, prefix) if tensor is not getattr(head, "weight", None)]
    if own or head is None or head.weight.shape != embedding.weight.shape:
        raise ConfigurationError(
            f"tie_first=True: the logits of {cls.__name__} need more than the embedding of {name}"
            + (f", {', '.join(own[:3])}" if own else "")
            + f"; boost a {cls.__name__} with weights of its own, or use tie_first=False"
        )
    head.weight = embedding.weight
    whole.training = head.training = base.training
    share_config(base, base.config, whole.config)
    return whole


def _own_tensors(whole: nn.Module, prefix: str) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers outside of the base model."""
    named = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()]
    return [(key, tensor) for key, tensor in named if not key.startswith(f"{prefix}.")]


def share_config(base: nn.Module, old: object, new: object) -> None:
    """Replace the configuration object `old` by `new` in all modules of `base`.

    As in a model that is built at once, all modules then share one configuration. The object `old` is not modified.
    """
    for module in base.modules():
        if getattr(module, "config", None) is old:
            module.config = new
