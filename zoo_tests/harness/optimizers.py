"""Optimizers as users write them, elementwise and not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Params = Iterable[nn.Parameter]


class DerivedAdam(torch.optim.Adam):
    """A subclass that changes nothing."""


class TrustAdamW(torch.optim.AdamW):
    """Each tensor moves by as much as its norm allows."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        before = [param.detach().clone() for param in params]
        super().step(closure)
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old + (param - old) * old.norm() / (1 + param.norm()))


class Lamb(torch.optim.Optimizer):
    """Adam whose update is as long as the parameter (You et al., arXiv 1904.00962)."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(param), torch.zeros_like(param)
                state["first"].lerp_(param.grad, 0.1)
                state["second"].lerp_(param.grad.square(), 0.001)
                update = state["first"] / (state["second"].sqrt() + 1e-6)
                param.sub_(group["lr"] * param.norm() / (update.norm() + 1e-12) * update)


class Lion(torch.optim.Optimizer):
    """The sign of a momentum (Chen et al., arXiv 2302.06675)."""

    def __init__(self, params: Params, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.sub_(group["lr"] * torch.sign(0.9 * momentum + 0.1 * param.grad))
                momentum.lerp_(param.grad, 0.01)


class ClippedSGD(torch.optim.SGD):
    """Clips the norm of all of its gradients by itself."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.1)
        super().step(closure)
