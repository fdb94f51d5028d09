"""A copy of a model without the values of its parameters, from which a shard under another layout can be built."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def empty_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a model; parameters are on the meta device, buffers and hooks are those of the original.

    The copy does not know where the model reads its values. Buffers of the model have values already.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _empty(parameter)
        hooks = [held for name in _HOOKS if (held := vars(module).get(name)) is not None]
        # Hooks may be methods of any object, which a deep copy would include.
        kept = chain(module._buffers.values(), *(held.values() for held in hooks))
        memo |= {id(each): each for each in kept if each is not None}
        # A deep copy of an ordered dictionary, even of an empty one, takes longer than all the rest of a module.
        memo |= {id(held): held.copy() for held in hooks}
    reader = vars(model).get("weight_reader")
    if reader is not None:
        memo[id(reader)] = None
    found = copy.deepcopy(model, memo)
    found.__dict__.pop("weight_reader", None)
    return found


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    found.__dict__.update(parameter.__dict__)
    return found
