"""Biases of routers that balance experts without an auxiliary loss (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

A bias is added to the scores of the experts only to choose some of them. After each step it grows for experts that had
fewer tokens than the mean, and falls for those that had more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.expert_parallel.experts import INDICES, expert_modules, num_experts
from shardformer.utils.untraced import in_backward, untraced

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


class ExpertLoad:
    """Counts of tokens per expert, of the layers on this rank. Copies of a model share it.

    A token counts once for each of its choices, whether or not the expert has room for it. Padding does not count.

    Args:
        model: the transformers model, sharded.
        mask_of: inputs of the model's forward -> attention mask of this rank's tokens, or None.

    Attributes:
        sizes: path of the experts of a layer -> number of experts.
        counts: path of the experts of a layer -> [experts], int64; grows with every pass.
    """

    def __init__(self, model: nn.Module, mask_of: Callable[[Mapping[str, Any]], Tensor | None]) -> None:
        self.sizes: dict[str, int] = {}
        self.counts: dict[str, Tensor] = {}
        self._is_counting, self._mask, self._mask_of = False, None, mask_of
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for path, experts in expert_modules(model):
            self.sizes[path] = num_experts(experts)
            # Before a capacity drops choices.
            experts.register_forward_pre_hook(partial(self._count, path), prepend=True, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLoad:
        return self

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of forward passes in this context, but not of their recomputation."""
        before, self._is_counting = self._is_counting, True
        try:
            yield
        finally:
            self._is_counting = before

    def take(self) -> dict[str, Tensor]:
        """Return the counts, and begin to count from zero."""
        taken, self.counts = self.counts, {}
        return taken

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._is_counting:
            self._mask = self._mask_of(kwargs)

    @untraced
    def _count(self, path: str, experts: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._is_counting or in_backward():
            return
        index = args[1] if len(args) > 1 else next(kwargs[name] for name in INDICES if name in kwargs)
        if path not in self.counts:
            self.counts[path] = torch.zeros(self.sizes[path], dtype=torch.int64, device=index.device)
        weights = torch.ones_like(index, dtype=torch.int64)
        if self._mask is not None and self._mask.numel() == len(index):
            weights = weights * (self._mask.reshape(-1, 1) != 0)  # [tokens, 1]
        self.counts[path].scatter_add_(0, index.reshape(-1).long(), weights.reshape(-1))
