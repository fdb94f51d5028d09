"""Names that peft gives to a model's tensors in adapter files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.peft.checks import LAYER_KINDS
from shardformer.peft.kinds import adapter_configs, is_a, kind_of

# Name in a model -> name in an adapter file.
FileNames = Mapping[str, str]


def file_names(model: nn.Module) -> dict[str, FileNames]:
    """Return the file names of each adapter's tensors, as given by peft for the whole model.

    Covers only the kinds whose files hold parameters and buffers unchanged.
    """
    if not is_a(model, "model"):
        return {}
    # One tensor per name, even if parameters are tied: shows which tensors peft wants, and under which names.
    state = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in model.state_dict(keep_vars=True).items()
    }
    own = {id(tensor): name for name, tensor in state.items()}
    found = {}
    for adapter, config in adapter_configs(model).items():
        if kind_of(config) in LAYER_KINDS:
            saved = adapter_tensors(model, adapter, state)
            found[adapter] = {own[id(tensor)]: name for name, tensor in saved.items()}
    return found


def adapter_tensors(model: nn.Module, adapter: str, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return name in the file -> tensor, for an adapter of a whole model.

    Args:
        state: tensors to choose from; None for the model's own.
    """
    from peft import get_peft_model_state_dict  # already imported, as the model is one of peft's

    saves_embeddings = _saves_embeddings(model, model.peft_config[adapter])
    return get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=saves_embeddings
    )


def _saves_embeddings(model: nn.Module, config: Any) -> bool:
    """Return whether peft saves embeddings: those that have an adapter, and those that were resized.

    peft's own 'auto' asks the hub for the original size; this function uses local files only.
    """
    if config.is_prompt_learning or getattr(config, "trainable_token_indices", None) is not None:
        return False
    if kind_of(config) == "TRAINABLE_TOKENS" or not hasattr(model, "get_input_embeddings"):
        return False
    if is_a(model.get_input_embeddings(), "layer") or is_a(model.get_output_embeddings(), "layer"):
        return _targets_embeddings(config)
    return _is_resized(model, config)


def _targets_embeddings(config: Any) -> bool:
    """Return whether the targets include embeddings, by the names that peft uses for them."""
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = config.target_modules  # a string is a regular expression
    return isinstance(targets, str) or any(name in targets for name in EMBEDDING_LAYER_NAMES)


def _is_resized(model: nn.Module, config: Any) -> bool:
    own, path = getattr(model, "config", None), config.base_model_name_or_path
    if not path or not hasattr(own, "vocab_size"):
        return False
    try:
        return type(own).from_pretrained(path, local_files_only=True).vocab_size != own.vocab_size
    except (OSError, ValueError):
        return False
