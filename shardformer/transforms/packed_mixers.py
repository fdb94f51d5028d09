"""Which models run their token mixers over one document at a time, where documents are packed into rows."""

from __future__ import annotations

import ast
import inspect

from torch import nn

from shardformer.attention.packed_mixers import keep_documents_apart
from shardformer.policies.base import Policy
from shardformer.policies.registry import policy_for
from shardformer.transforms.context_parallel import layers_of, mixers_of_layers
from shardformer.transforms.packed_masks import can_hide_documents, hide_other_documents
from shardformer.utils.source import syntax_of


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
