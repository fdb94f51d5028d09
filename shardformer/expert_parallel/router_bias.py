"""Biases of routers that balance experts without an auxiliary loss (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

A bias is added to the scores of the experts only to choose some of them. After each step it grows for experts that had
fewer tokens than the mean, and falls for those that had more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardformer.expert_parallel.experts import expert_modules, num_experts

_NAMES = ("e_score_correction_bias", "expert_bias")


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the bias of each layer's router, [experts] or [1, experts], by the path of the layer's experts."""
    return {path: getattr(owner, name) for path, (owner, name) in _owners(model).items()}


def keep_biases_from_optimizer(model: nn.Module) -> None:
    """Turn biases that are parameters into fp32 buffers: 16 bits would round small updates away."""
    for owner, name in _owners(model).values():
        if name in owner._parameters:
            value = owner._parameters.pop(name).detach()
            owner.register_buffer(name, value.float() if not value.is_meta else value)


@torch.no_grad()
def update_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move a bias, in place, by `rate` against the sign of each expert's excess load.

    Args:
        bias: [experts] or [1, experts].
        load: tokens of each expert since the last step, over all ranks, [experts].
        rate: step size; the paper uses 0.001.
    """
    excess = load.double() - load.double().mean()
    bias.sub_(rate * excess.sign().to(bias).view_as(bias))


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module that holds the bias and the bias's name, by the path of the experts."""
    found = {}
    for path, experts in expert_modules(model):
        inside = {id(each) for each in experts.modules()}
        for owner in model.get_submodule(path.rpartition(".")[0]).modules():
            for name in _NAMES if id(owner) not in inside else ():
                bias = getattr(owner, name, None)
                if isinstance(bias, Tensor) and bias.numel() == num_experts(experts):
                    found[path] = owner, name
    return found
