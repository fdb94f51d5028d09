"""Several optimizers over one model: one backward pass for all, one loss scale, a step each.

What breaks here first: an optimizer that is not the one given to the backward pass. Look in
`plugins/hybrid_parallel/zero/optimizer.py` and `arithmetic.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.toy import EXACT, global_batch, mean_square, share_of, toy


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The first has what the second has not; the spare layer takes no part."""
    second = [*model.second.parameters(), *model.spare.parameters()]
    return [torch.optim.SGD(model.first.parameters(), lr=0.2, momentum=0.5), torch.optim.AdamW(second, lr=0.01)]


def _boosted(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Booster, Any, list[Any]]:
    model, booster = toy(dtype), Booster(plugin=HybridParallelPlugin(**options))
    model, _, *optimizers = booster.boost(model, mean_square, *_optimizers(model))
    return booster, model, optimizers


def _train(plain: nn.Module, booster: Booster, model: Any, optimizers: list[Any], ordinary: bool) -> None:
    """The second optimizer steps every other time; the backward pass is given the one or the other."""
    plain_optimizers = _optimizers(plain)
    for step in range(4):
        batch = global_batch(step, rows=6)
        share = share_of(batch)
        mean_square(plain(batch["x"]), batch).backward()
        if ordinary:
            booster.backward(mean_square(model(x=share["x"]), share), optimizers[step % 2])
        else:
            booster.execute_pipeline(iter([share]), model, optimizer=optimizers[step % 2])
        stepping = slice(0, 1 + step % 2)
        for optimizer in [*optimizers[stepping], *plain_optimizers[stepping]]:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.unwrap().named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_equal_plain_torch(zero_stage: int) -> None:
    for ordinary in (False, True):
        _train(toy(), *_boosted(zero_stage=zero_stage, zero_bucket_size_in_mb=1e-4), ordinary)


@distributed(2)
def test_gradients_of_all_optimizers_are_clipped_by_one_norm() -> None:
    booster, model, optimizers = _boosted()
    plain, batch = toy(), global_batch(0, rows=6)
    booster.execute_pipeline(iter([share_of(batch)]), model, optimizer=optimizers[0])
    mean_square(plain(batch["x"]), batch).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), expected, **EXACT)
    for optimizer in [*optimizers, *_optimizers(plain)]:
        optimizer.step()
    for found, weight in zip(model.unwrap().parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, weight, **EXACT)


def _batch(step: int) -> dict[str, Tensor]:
    return global_batch(step, rows=6, dtype=torch.float32)


@contextmanager
def _overflow(parameter: nn.Parameter, happens: bool = True) -> Iterator[None]:
    """The gradient of `parameter` is inf in here."""
    handle = Tensor.register_hook(parameter, lambda gradient: gradient * (torch.inf if happens else 1.0))
    yield
    handle.remove()


@distributed(2)
def test_one_loss_scale_a_model() -> None:
    """An overflow in the first optimizer alone: the second takes its step, unscaled as it was scaled."""
    booster, model, optimizers = _boosted(torch.float32, precision="fp16", initial_scale=64.0, growth_interval=2)
    plain = toy(torch.float32)
    plain_optimizers, scaler = _optimizers(plain), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(5):
        batch, overflows = _batch(step), step == 1
        with _overflow(plain.first.weight, overflows), _overflow(model.unwrap().first.weight, overflows):
            scaler.scale(mean_square(plain(batch["x"]), batch)).backward()
            booster.execute_pipeline(iter([share_of(batch)]), model, optimizer=optimizers[0])
        for optimizer, plain_optimizer in zip(optimizers, plain_optimizers, strict=True):
            optimizer.step()
            scaler.step(plain_optimizer)
        scaler.update()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [overflows, False]
        assert optimizers[0].loss_scale.value == optimizers[1].loss_scale.value == scaler.get_scale()
        for optimizer in [*optimizers, *plain_optimizers]:
            optimizer.zero_grad()
        _check_close(model, plain)
    assert scaler.get_scale() == 64.0


def _check_close(model: Any, plain: nn.Module) -> None:
    found = dict(model.unwrap().named_parameters())
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name].float(), param, rtol=5e-3, atol=2e-3)


@distributed(2)
def test_gradients_that_wait_are_brought_to_a_new_scale() -> None:
    """The first overflows and halves the scale while the second still accumulates."""
    booster, model, optimizers = _boosted(torch.float32, precision="fp16", initial_scale=1024.0)
    plain = toy(torch.float32)
    for step in range(2):
        batch = _batch(step)
        with _overflow(model.unwrap().first.weight):
            booster.execute_pipeline(iter([share_of(batch)]), model, optimizer=optimizers[0])
        optimizers[0].step()
        optimizers[0].zero_grad()
        mean_square(plain(batch["x"]), batch).backward()
    assert optimizers[0].loss_scale.value == 512.0, "the scale of the second pass, whose round is not over"
    gradient: Tensor = optimizers[1].full_gradients()["second.weight"]
    torch.testing.assert_close(gradient, plain.second.weight.grad, rtol=5e-3, atol=1e-3)


@distributed(2)
def test_a_loss_through_another_boosted_model() -> None:
    """Two models that are trained against each other: the one's pass leaves gradients in the other, as in torch."""
    booster = Booster(plugin=HybridParallelPlugin(zero_bucket_size_in_mb=1e-4))
    plain = [toy(), nn.Linear(3, 1).double()]
    models = copy.deepcopy(plain)
    plain_optimizers, optimizers = [], []
    for index, lr in enumerate((0.1, 0.3)):
        plain_optimizers.append(torch.optim.SGD(plain[index].parameters(), lr=lr))
        optimizer = torch.optim.SGD(models[index].parameters(), lr=lr)
        models[index], optimizer = booster.boost(models[index], optimizer)
        optimizers.append(optimizer)
    for step in range(3):
        batch = global_batch(step, rows=6)
        share = share_of(batch)
        for turn, sign in enumerate((1.0, -1.0)):
            (sign * plain[1](plain[0](batch["x"])).square().mean()).backward()
            booster.backward(sign * models[1](input=models[0](x=share["x"])).square().mean(), optimizers[turn])
            for each in (plain_optimizers, optimizers):
                each[turn].step()
                each[turn].zero_grad()  # the other's gradients stay, and add up
        for found, expected in zip(models, plain, strict=True):
            for param, other in zip(found.unwrap().parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(param, other, **EXACT)


@distributed(2)
def test_what_is_refused() -> None:
    booster, model, optimizers = _boosted()
    _, _, others = _boosted()
    share = share_of(global_batch(0))
    with pytest.raises(ConfigurationError, match=r"the SGD was boosted with another model; give the optimizer that"):
        booster.execute_pipeline(iter([share]), model, optimizer=others[0])
    booster.execute_pipeline(iter([share]), model)
    with pytest.raises(ConfigurationError, match=r"finds no gradients, because booster.execute_pipeline ran without"):
        optimizers[0].step()
    booster.execute_pipeline(iter([share]), model, optimizer=optimizers[0])
    booster.execute_pipeline(iter([share]), model)
    optimizers[0].step()  # of the gradients of the first
    shared = toy()
    pair = [torch.optim.SGD(shared.parameters(), lr=0.1), torch.optim.SGD(shared.second.parameters(), lr=0.1)]
    with pytest.raises(ConfigurationError, match="two optimizers hold second.weight; give each parameter to one"):
        Booster(plugin=HybridParallelPlugin()).boost(shared, *pair)


@distributed(2)
def test_steps_without_gradients_move_nothing_as_in_torch() -> None:
    """Before any backward pass, twice after one, and after an evaluation that is one."""
    booster, model, (first, second) = _boosted()
    plain = toy()
    plain_first, plain_second = _optimizers(plain)
    batch = global_batch(0)
    for optimizer in (first, plain_first):
        optimizer.step()
    booster.execute_pipeline(iter([share_of(batch)]), model, optimizer=first)
    mean_square(plain(batch["x"]), batch).backward()
    model.eval()
    booster.execute_pipeline(iter([share_of(batch)]), model)
    for optimizer in (first, plain_first, first, plain_first, second, plain_second):
        optimizer.step()
    for found, expected in zip(model.unwrap().parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)
