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


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Gradients at y, steps at z, results at their average x; `train` and `eval` change y to x and back.

    Defazio et al., arXiv 2405.15682; the parameters are y in training mode, and x in evaluation mode.
    """

    beta = 0.9

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0, "train_mode": False})

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True, 1 - self.beta)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False, 1 - 1 / self.beta)

    def _switch(self, to_train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = to_train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() before optimizer.step()")
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.detach().clone())
                param.lerp_(z, 1 / group["steps"])
                param.add_(param.grad, alpha=group["lr"] * (self.beta * (1 - 1 / group["steps"]) - 1))
                z.sub_(param.grad, alpha=group["lr"])


class BlockwiseAdam(torch.optim.Optimizer):
    """Adam with states in 8 bit, each block of 256 elements of a parameter with a scale of its own.

    After Dettmers et al., arXiv 2110.02861, with a linear code.
    """

    block = 256

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                first, second = (self._read(param, state, key) for key in ("first", "root"))
                first.lerp_(param.grad, 0.1)
                second = second.square_().lerp_(param.grad.square(), 0.01)
                self._write(state, "first", first)
                self._write(state, "root", second.sqrt())
                param.sub_(group["lr"] * first / (second.sqrt() + 1e-3))

    def _read(self, param: nn.Parameter, state: dict[str, Any], key: str) -> torch.Tensor:
        if key not in state:
            return torch.zeros_like(param)
        scales = state[f"{key}_scales"].repeat_interleave(self.block)[: param.numel()]
        return (state[key].flatten() * scales).view_as(param).to(param.dtype)

    def _write(self, state: dict[str, Any], key: str, values: torch.Tensor) -> None:
        flat = nn.functional.pad(values.flatten(), (0, -values.numel() % self.block)).view(-1, self.block)
        scales = flat.abs().amax(1) / 127
        codes = (flat / scales.clamp(min=1e-30).unsqueeze(1)).round().to(torch.int8)
        state[key], state[f"{key}_scales"] = codes.flatten()[: values.numel()].view(values.shape), scales


class SAM(torch.optim.Optimizer):
    """Gradients at a worse point: up the gradient, by a norm of all of them (Foret et al., arXiv 2010.01412).

    The first evaluation of the closure is at the weights, the second at the worse point.
    """

    def __init__(self, params: Params, lr: float = 0.1, rho: float = 0.3) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def first_step(self, zero_grad: bool = False) -> None:
        """The first half, as published code has it; not used here."""

    def climb(self, trained: list[nn.Parameter]) -> list[torch.Tensor]:
        """The ways up of the parameters."""
        norm = torch.stack([param.grad.norm() for param in trained]).norm()
        return [param.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)) for param in trained]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        trained = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        ways = self.climb(trained)
        for param, way in zip(trained, ways, strict=True):
            param.add_(way)
        closure()
        for param, way in zip(trained, ways, strict=True):
            param.sub_(way)
        self.base.step()
        return loss


class PointwiseSAM(SAM):
    """Each element goes up by itself, without a norm."""

    def climb(self, trained: list[nn.Parameter]) -> list[torch.Tensor]:
        return [self.param_groups[0]["rho"] * param.grad for param in trained]
