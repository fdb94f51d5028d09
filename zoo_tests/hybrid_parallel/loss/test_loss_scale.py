"""DynamicLossScale: halves, grows, and survives a save.

What breaks here first: the count of good steps. Look in `plugins/hybrid_parallel/loss/arithmetic.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from plugins.hybrid_parallel.loss.arithmetic import DynamicLossScale, LossScale


def _step(scale: LossScale, overflowed: bool) -> None:
    scale.record(overflowed)
    scale.update()


def test_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = DynamicLossScale(8.0, growth_interval=3)
    seen = []
    for overflowed in (False, False, True, False, False, False, False):
        _step(scale, overflowed)
        seen.append(scale.value)
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0], "an overflow starts the count of good steps anew"


def test_stays_between_one_and_infinity() -> None:
    low, high = DynamicLossScale(2.0, 1), DynamicLossScale(2.0**1023, 1)
    for _ in range(3):
        _step(low, True)
        _step(high, False)
    assert (low.value, high.value) == (1.0, 2.0**1023)


def test_state_includes_the_count_of_good_steps() -> None:
    scale, other = DynamicLossScale(16.0, 2), DynamicLossScale(1.0, 2)
    _step(scale, False)
    other.load_state_dict(scale.state_dict())
    _step(other, False)
    assert other.value == 32.0


def test_without_scaling_there_is_no_state() -> None:
    scale = LossScale()
    _step(scale, True)
    scale.load_state_dict(DynamicLossScale(4.0, 2).state_dict())
    assert (scale.value, scale.state_dict(), scale.watches_overflow) == (1.0, {}, False)
    dynamic = DynamicLossScale(4.0, 2)
    dynamic.load_state_dict({})  # of a run without scaling
    assert dynamic.value == 4.0


def test_several_optimizers_share_it_as_a_grad_scaler() -> None:
    """Steps of a round, each with or without an overflow; the same rounds through torch's scaler."""
    rounds = [(False, True), (False, False), (True, True), (), (False, False), (False,), (True, False), (False, False)]
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    scaler, scale = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), DynamicLossScale(64.0, 2)
    scaler.scale(torch.ones(()))
    for overflows in rounds:
        for parameter, optimizer, overflowed in zip(parameters, optimizers, overflows, strict=False):
            parameter.grad = torch.full((1,), torch.inf if overflowed else 1.0)
            scaler.step(optimizer)
            scale.record(overflowed)
        if overflows:
            scaler.update()
        scale.update()
        assert scale.value == scaler.get_scale()
