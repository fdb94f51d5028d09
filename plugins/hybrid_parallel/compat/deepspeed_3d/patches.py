"""Implement `custom_patcher`: user functions that wrap the forward of selected modules; logits of a tied embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from booster.errors import ConfigurationError
from shardformer.cross_entropy.vocab_parallel import cross_entropy_of_tokens
from shardformer.distributed.collectives import copy_to_region, gather_from_region
from shardformer.layers.embedding import VocabParallelLMHead, check_indices
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.module_paths import ends_in, has_module, nearest_names

# (the module's forward, the module) -> its new forward
Patch = Callable[[Callable[..., Any], nn.Module], Callable[..., Any]]


def find_patched(model: nn.Module, patcher: Mapping[str, Patch]) -> dict[nn.Module, list[Patch]]:
    """Find the modules that `patcher` names.

    Args:
        patcher: path of a module or the end of a path, in which `*` stands for any number -> patch. A full path selects
            only that module.

    Returns:
        module -> its patches, innermost first.

    Raises:
        ConfigurationError: a name matches no module; the message suggests the nearest names.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[nn.Module, list[Patch]] = {}
    problems = []
    for name, patch in patcher.items():
        paths = [name] if name in modules else [path for path in modules if ends_in(path, name)]
        if not paths:
            problems.append(
                f"custom_patcher names '{name}', which matches no module of {type(model).__name__}; use one of "
                f"{nearest_names(name, modules)}, or * for the number of a layer"
            )
        for path in paths:
            found.setdefault(modules[path], []).append(patch)
    if problems:
        raise ConfigurationError("; ".join(problems))
    return found


class ForwardPatches:
    """Forward patches of a model that is about to be sharded.

    A module that sharding replaces by a sharded version, or whose forward it replaces, is patched again afterwards. The
    patch then gets the sharded module and its forward.

    Args:
        patched: module -> its patches.
    """

    def __init__(self, model: nn.Module, patched: Mapping[nn.Module, list[Patch]]) -> None:
        # Store paths instead of modules, so that replaced modules can be freed.
        self._patches = {path: patched[module] for path, module in model.named_modules() if module in patched}

    def apply(self, model: nn.Module) -> None:
        """Patch each new module on this rank; raises ConfigurationError if a patch returned no function."""
        for path, patches in self._patches.items():
            if not has_module(model, path) or isinstance(module := model.get_submodule(path), StagePlaceholder):
                continue  # the module runs on another stage
            present = vars(module).get("forward")
            if getattr(present, "patched_module", None) is module:
                continue
            if hasattr(present, "patched_module"):  # the sharded module is a copy of the patched one
                del module.forward
            module.forward = _patched(path, module, patches)

    def remove(self, model: nn.Module) -> None:
        """Remove the patches, after the model turned out not to be shardable as requested."""
        for path in self._patches:
            module = model.get_submodule(path) if has_module(model, path) else None
            present = vars(module).get("forward") if module is not None else None
            if hasattr(present, "native_in_dict"):
                del module.forward
                if present.native_in_dict is not None:
                    module.forward = present.native_in_dict


def _patched(path: str, module: nn.Module, patches: list[Patch]) -> Callable[..., Any]:
    native = module.forward
    new = native
    for patch in patches:
        new = patch(new, module)
        if not callable(new):
            raise ConfigurationError(
                f"custom_patcher: the patch of {path} returned a {type(new).__name__}; return the new forward"
            )

    @functools.wraps(native)  # stages match the inputs of a layer by parameter name
    def forward(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    forward.__module__ = __name__  # marks it as a patch, not a user's own forward: it will wrap the sharded one
    forward.patched_module, forward.native_in_dict = module, vars(module).get("forward")
    return forward


# (hidden states [batch, seq, hidden], module with the tied weight) -> logits
LogitHelper = Callable[[Any, nn.Module], Tensor]


def vocab_parallel_logit_helper(lm_output: Any, embedding: nn.Module) -> Tensor:
    """Compute logits with the weight of an embedding, for this rank's rows of it.

    Args:
        lm_output: the hidden states [batch, seq, hidden], or a tuple with them first. With any helper, their gradient
            is all-reduced over the ranks that share the vocabulary.
        embedding: module with the weight, [vocabulary, hidden] or this rank's rows.
    """
    hidden = lm_output[0] if isinstance(lm_output, tuple) else lm_output
    return F.linear(hidden, embedding.weight)


def helper_as_patch(helper: LogitHelper) -> Patch:
    """Return the patch for an output head that computes its logits with `helper`."""

    def patch(forward: Callable[[Tensor], Tensor], head: nn.Module) -> Callable[[Tensor], Tensor]:
        if not isinstance(head, VocabParallelLMHead):
            return lambda hidden: helper(hidden, head)

        def logits(hidden: Tensor) -> Tensor:
            found = helper(copy_to_region(hidden, head.group), head)
            if not head.gather_output:
                return found
            return gather_from_region(found, found.dim() - 1, head.group)[..., : head.full_out_features]

        return logits

    return patch


@dataclass
class _Reading:
    """State of one call of a loss function."""

    head: VocabParallelLMHead  # the head whose logits are sharded over the vocabulary
    knows: bool = False  # whether the loss function handles sharded logits, by calling `vocab_parallel_cross_entropy`


_reading: ContextVar[_Reading | None] = ContextVar("reading_logits", default=None)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Compute the cross-entropy of each label, in fp32 or higher precision.

    In a loss function for pairs of inputs and labels, the logits stay sharded over the vocabulary if the embedding is
    sharded. Anywhere else the logits are whole, and this is the plain cross-entropy.

    Args:
        logits: [..., vocabulary], or this rank's [..., padded vocabulary / ranks].
        labels: [...], the same on all ranks that share the vocabulary.
        ignore_index: label of positions whose loss is 0.

    Returns:
        The losses, [...].

    Raises:
        ConfigurationError: the width of `logits` is neither the vocabulary nor this rank's shard of it.
    """
    reading, width = _reading.get(), logits.shape[-1]
    vocab_range = group = None
    if reading is not None:
        reading.knows, head = True, reading.head
        rows = head.matrix.shape[0]
        if width == rows:
            vocab_range, group = head.vocab_range, head.group
            check_indices(labels, head.full_out_features, "label", ignored=ignore_index)
        elif width != head.full_out_features:
            raise ConfigurationError(
                f"vocab_parallel_cross_entropy got logits of width {width}; use those of a rank, {rows}, or of the "
                f"whole vocabulary, {head.full_out_features}"
            )
    losses = cross_entropy_of_tokens(logits.reshape(-1, width), labels.reshape(-1), vocab_range, group, ignore_index)
    return losses.view(labels.shape)


@contextmanager
def reading_cut_logits(model: nn.Module) -> Iterator[None]:
    """Run a loss, which must handle logits of `model` that are sharded over the vocabulary."""
    head = next((module for module in model.modules() if isinstance(module, VocabParallelLMHead)), None)
    if head is None or head.gather_output:
        yield
        return
    reading = _Reading(head)
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)
    if not reading.knows:
        raise ConfigurationError(
            f"loss_func got {head.matrix.shape[0]} of {head.full_out_features} columns of the logits and did not call "
            "vocab_parallel_cross_entropy; use it, or leave the embedding out of shard_vocab"
        )
