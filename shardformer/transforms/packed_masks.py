"""Packed documents in models that make their masks without `position_ids`, as GPT-OSS, OPT and BERT do.

transformers then does not see the documents of a row. While the forward of such a model runs with positions that
restart, its functions that build masks for SDPA and eager attention hide other documents, too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from torch import Tensor, nn

from shardformer.attention.packed_documents import (
    asks_for_cache,
    document_starts,
    keep_documents_apart,
    mask_calls,
    may_be_packed,
    runs_flash,
)
from shardformer.context_parallel.zigzag import restarts
from shardformer.policies.base import Policy
from shardformer.policies.registry import policy_for
from shardformer.transforms.context_parallel import layers_of, mixers_of_layers
from shardformer.utils.source import syntax_of

_POSITIONS = "position_ids"


class _Documents:
    """The documents in the rows of a forward pass.

    Args:
        numbers: of each token's document, [batch or 1, seq].

    Attributes:
        are_hidden: whether a mask that hides other documents has been made.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.are_hidden = numbers, False

    def hide(self, batch_size: int, mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a mask function of transformers' kind that hides other documents too."""
        self.are_hidden, numbers = True, self.numbers.expand(batch_size, -1)
        return lambda row, head, query, key: (
            mask_function(row, head, query, key) & (numbers[row, query] == numbers[row, key])
        )


_running: ContextVar[_Documents | None] = ContextVar("running_documents", default=None)


def can_hide_documents(model: nn.Module, policy: Policy) -> bool:
    """Return whether a model makes masks without positions in which other documents can be hidden.

    Its tokens were seen to meet in attention alone, and it has no head that answers one question a row, which looks at
    all of its tokens for that.
    """
    if "start_positions" in inspect.signature(model.forward).parameters or not policy.shares_sequences():
        return False
    makers = _makers(model)
    return bool(makers) and all(map(_sees_documents, makers))


def hide_other_documents(model: nn.Module) -> None:
    """Let a model that can hide other documents do so; where it gets an attention mask, it makes masks as ever."""
    _register_mask_functions()
    for maker in _makers(model):
        maker.register_forward_pre_hook(_begin, with_kwargs=True)
        maker.register_forward_hook(_end, always_call=True)
    model.masks_hide_documents = True


def _makers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make masks without positions: causal ones, or those of an encoder, where all are."""
    calls = {kind: mask_calls(kind) for kind in {type(each) for each in model.modules()}}
    is_causal = any(call.is_causal for found in calls.values() for call in found)
    ignores = not getattr(getattr(model, "config", None), "is_causal", True)  # makes those of an encoder instead
    lacking = {
        kind
        for kind, found in calls.items()
        if any(call.is_causal == is_causal and (ignores or not call.passes_positions) for call in found)
    }
    return [module for module in model.modules() if type(module) in lacking]


def _sees_documents(maker: nn.Module) -> bool:
    """Return whether the forward gets positions, and all masks made inside are those of its tokens, not of a tower."""
    configs = {id(each.config) for each in maker.modules() if hasattr(each, "config")}
    takes = _POSITIONS in inspect.signature(maker.forward).parameters
    return takes and configs == {id(getattr(maker, "config", None))}


def _begin(maker: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    given = {**inspect.signature(maker.forward).bind_partial(*args).arguments, **kwargs} if args else kwargs
    is_asked = may_be_packed(given) and not asks_for_cache(given) and restarts(given[_POSITIONS])
    is_asked &= not runs_flash(maker)  # which is told of borders
    _running.set(_Documents(document_starts(given[_POSITIONS]).cumsum(-1)) if is_asked else None)


def _end(maker: nn.Module, _: tuple, output: Any) -> None:
    documents = _running.get()
    _running.set(None)
    if documents is not None and not documents.are_hidden and output is not None:
        raise ValueError(
            f"position_ids restart within a row, and {type(maker).__name__} makes its masks without transformers' "
            "functions, so that the documents of the row would see each other; give each document a row of its own"
        )


def _register_mask_functions() -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name in ("sdpa", "eager"):
        masks = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not hasattr(masks, "hides_documents"):
            AttentionMaskInterface.register(name, _hiding_documents(masks))


def _hiding_documents(masks: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' function that makes the masks for a kernel, with the documents that run now hidden."""

    @wraps(masks)
    def hiding(*args: Any, **given: Any) -> Any:
        documents = _running.get() if not args else None  # transformers' models name all arguments
        if documents is not None and documents.numbers.shape[-1] == given["q_length"] == given["kv_length"]:
            given["mask_function"] = documents.hide(given["batch_size"], given["mask_function"])
            given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masks(*args, **given)

    hiding.hides_documents = True
    return hiding


def can_run_by_document(model: nn.Module, policy: Policy) -> bool:
    """Return whether the layers have token mixers that were seen to be causal, and can be told of documents."""
    is_seen = policy.shares_sequences() and not policy.tokens_mix_only_in_attention()
    return is_seen and bool(mixers_of_layers(model, policy)) and _hands_arguments_on(model, layers_of(model, policy))


def separate_documents(model: nn.Module) -> None:
    """Let a whole model keep packed documents apart in its masks and in its token mixers, if it can."""
    try:
        policy = policy_for(model)
    except ValueError:  # a model without policy has no layers that we know
        return
    policy.set_model(model)
    if can_hide_documents(model, policy):
        hide_other_documents(model)
    if can_run_by_document(model, policy):
        keep_documents_apart(model, layers_of(model, policy))


def _hands_arguments_on(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Return whether arguments that the model does not know reach its layers."""
    around = [module for module in model.modules() if any(each is layers for each in module.modules())]
    takers = [module for module in around if module is not layers]
    kinds = [{each.kind for each in inspect.signature(module.forward).parameters.values()} for module in takers]
    return all(inspect.Parameter.VAR_KEYWORD in each for each in kinds) and _calls_with_more(takers[-1])


def _calls_with_more(module: nn.Module) -> bool:
    """Return whether what a module runs in a loop, as its layers, gets the arguments that it does not know."""
    try:
        tree = syntax_of(type(module).forward)
    except OSError:
        return False
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    calls = [call for loop in loops for call in ast.walk(loop) if isinstance(call, ast.Call)]
    targets = {node.id for loop in loops for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    of_layers = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in targets]
    return bool(of_layers) and all(any(word.arg is None for word in call.keywords) for call in of_layers)
