"""16-bit training: master weights, fp32 accumulation, and the fp16 loss scale over the ranks.

What breaks here first: updates too small for a 16-bit weight, and ranks that disagree about an overflow. Look in
`plugins/hybrid_parallel/loss/arithmetic.py` and `zero/bucket.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero.whole_parameters import gather_pieces
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.toy import global_batch, mean_square, share_of, toy


def _boosted(lr: float, **options: Any) -> tuple[Booster, Any, Any]:
    booster, model = Booster(plugin=HybridParallelPlugin(**options)), toy(torch.float32)
    model, optimizer, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr), mean_square)
    return booster, model, optimizer


def _step(booster: Booster, model: Any, optimizer: Any, step: int, poison: bool = False) -> Tensor:
    share = share_of(global_batch(step, rows=8, dtype=torch.float32))
    if poison:
        share["x"][0, 0] = float("inf")
    loss = booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _movement_of_a_bf16_run(lr: float, steps: int, **options: Any) -> Tensor:
    """How far the first weight has come, in what the optimizer takes for its value."""
    boosted = _boosted(lr, precision="bf16", **options)
    assert boosted[1].dtype == torch.bfloat16
    before = _fp32_values(boosted[2], "first.weight")
    for _ in range(steps):
        _step(*boosted, 0)
    return _fp32_values(boosted[2], "first.weight") - before


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_small_updates_add_up_in_master_weights(zero_stage: int) -> None:
    """40 steps, each below the rounding of a bf16 weight: they show with master weights and are lost without."""
    lr, steps = 2e-5, 40
    plain = toy(torch.float32)
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    batch = global_batch(0, rows=8, dtype=torch.float32)
    for _ in range(steps):
        mean_square(plain(batch["x"]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = (plain.first.weight - toy(torch.float32).first.weight).detach()
    found = _movement_of_a_bf16_run(lr, steps, zero_stage=zero_stage)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05 * expected.abs().max().item())
    without = _movement_of_a_bf16_run(lr, steps, zero_stage=zero_stage, master_weights=False)
    assert without.norm() < 0.5 * expected.norm()


def _fp32_values(optimizer: Any, name: str) -> Tensor:
    """What the optimizer has as the parameter's value: the master where there is one."""
    for bucket in optimizer.buckets:
        for index, param in enumerate(bucket.params):
            if optimizer.names[param] == name:
                pieces = {p.index: p.parameter.detach().float() for p in bucket.pieces if p.index == index}
                return gather_pieces(bucket, pieces, torch.float32)[index].clone()
    raise KeyError(name)


@distributed(2)
def test_gradients_are_accumulated_in_fp32() -> None:
    """1024 + 1 is 1024 in bf16; 64 small gradients, a micro-batch each, after a large one must still be there."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", microbatch_size=1))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.ones(65, 1)
    x[0] = 1024.0

    booster.execute_pipeline(iter([{"input": x}]), model, lambda outputs, _: outputs.float().mean(), optimizer)
    gradient = optimizer.full_gradients()["weight"]
    assert gradient.dtype == torch.float32
    assert gradient.item() == pytest.approx((1024 + 64) / 65, rel=1e-2)


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_loss_scale_halves_skips_and_grows_on_all_ranks(zero_stage: int) -> None:
    boosted = _boosted(0.1, precision="fp16", initial_scale=64.0, growth_interval=2, zero_stage=zero_stage)
    _, model, optimizer = boosted
    scales = []
    for step, poisoned in enumerate((False, True, False, False, False, False)):
        before = [param.detach().clone() for param in model.parameters()]
        _step(*boosted, step, poison=poisoned and dist.get_rank() == 1)
        after = list(model.parameters())
        same = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert optimizer.step_was_skipped == poisoned == same, f"step {step}"
        scales.append(optimizer.loss_scale.value)
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0, 128.0]
    values = torch.cat([param.detach().float().flatten() for param in model.parameters()])
    assert torch.isfinite(values).all()
    of_rank_0 = values.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(values, of_rank_0), "replicas have drifted apart"


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
@distributed(2)
def test_the_scale_does_not_show_in_gradients_norm_and_update(scale: float) -> None:
    _, reference, _ = reference_run = _boosted(0.1, precision="fp16", initial_scale=256.0, max_norm=0.5)
    _, model, optimizer = boosted = _boosted(0.1, precision="fp16", initial_scale=scale, max_norm=0.5)
    for step in range(3):
        losses = [_step(*run, step).item() for run in (reference_run, boosted)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3)
        assert optimizer.grad_norm == pytest.approx(reference_run[2].grad_norm, rel=5e-3)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=5e-3, atol=1e-3)
