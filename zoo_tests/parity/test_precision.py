"""fp32, bf16 and fp16, and curves of 20 steps.

The reference of a 16-bit run is plain training in the same precision: parameters cast, fp32 originals for the
optimizer, losses from fp32 logits. The same rounding falls differently when a sum is cut over ranks, so the limits
are those of the number format; a forgotten unscaling, or a sum in 16 bit, exceeds them by far.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.harness.case import Case, Recipe, share_of
from zoo_tests.harness.compare import check_case, tolerance_of
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head"}


def _cases(precision: str, optimizer: str, layouts: tuple[str, ...], turn: int, fast: tuple[str, ...] = ()) -> list:
    """Families take turns with the layouts, others in each precision; fp64 has proved all of both together."""
    cases = []
    for number, (family, head) in enumerate(HEADS.items()):
        for place, layout in enumerate(layouts):
            recipe = Recipe(family=family, head=head, precision=precision, optimizer=optimizer, steps=3)
            case = Case(recipe=recipe, layout=layout)
            mark = pytest.mark.slow if (number + place) % 3 == turn else pytest.mark.campaign
            cases.append(pytest.param(case, id=str(case), marks=[] if (family, layout) == fast else [mark]))
    return cases


@pytest.mark.parametrize("case", _cases("fp32", "adamw", ("tp4", "tp2pp2", "pp2dp2"), 0))
def test_fp32_with_adamw(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path, weights=False)


@pytest.mark.parametrize(
    "case",
    _cases("bf16", "momentum", ("tp2", "pp2dp2", "tp2pp2"), 0, fast=("gpt2", "pp2dp2"))
    + _cases("fp16", "momentum", ("tp2", "pp2dp2", "tp2pp2"), 2, fast=("bert", "tp2pp2")),
)
def test_16_bit(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("bert", "tp2pp2", marks=pytest.mark.campaign),
        pytest.param("llama", "pp2dp2", marks=pytest.mark.campaign),
        pytest.param("gpt2", "tp2dp2", marks=pytest.mark.slow),
    ],
)
def test_loss_curve_of_20_steps(family: str, layout: str, tmp_path: Path) -> None:
    recipe = Recipe(family=family, head=HEADS[family], optimizer="adamw", precision="fp32", steps=20)
    check_case(Case(recipe=recipe, layout=layout), tmp_path, weights=False)


# ----- overflow in fp16 -----


def _step_over_an_overflow(case: Case) -> None:
    """The gradient of one parameter overflows on the last rank alone; the next step is sound again."""
    boosted = boost(case)
    before = _weights(boosted)
    hook = None
    if dist.get_rank() == dist.get_world_size() - 1:
        param = next(param for param in boosted.model.unwrap().parameters() if param.requires_grad)
        hook = torch.Tensor.register_hook(param, lambda gradient: gradient * float("inf"))
    scale = boosted.optimizer.loss_scale.value
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    boosted.finish_step()
    assert boosted.optimizer.step_was_skipped
    assert boosted.optimizer.loss_scale.value == scale / 2
    assert all(torch.equal(value, before[name]) for name, value in _weights(boosted).items())
    if hook is not None:
        hook.remove()
    loss = boosted.pipeline_backward(boosted.share(case.recipe.batch(1)))
    boosted.finish_step()
    assert torch.isfinite(loss) and not boosted.optimizer.step_was_skipped
    assert any(not torch.equal(value, before[name]) for name, value in _weights(boosted).items())


def _weights(boosted: Boosted) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in boosted.model.unwrap().named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("layout", ["tp2pp2", "pp2dp2"])
def test_overflow_on_one_rank_skips_the_step_on_all(layout: str, zero_stage: int) -> None:
    recipe = Recipe(family="bert", head="masked_lm", precision="fp16", optimizer="adamw")
    run_on_ranks(4, _step_over_an_overflow, Case(recipe=recipe, layout=layout, zero_stage=zero_stage))


# ----- floating-point entries of a batch -----

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Regression(nn.Module):
    """A model of the user's own, whose first parameter may have another dtype than its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.norm, self.cell, self.head = nn.LayerNorm(6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor, start: Tensor, target: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """x: [batch, seq, 6]; start: [batch, 6], the state before the first token; target, weight: [batch]."""
        return {"loss": self.distance(self.guess(x, start), target, weight)}

    def guess(self, x: Tensor, start: Tensor) -> Tensor:
        hidden, _ = self.cell(self.norm(x * self.gain), start[None])
        return self.head(hidden[:, -1]).squeeze(-1)

    def distance(self, guess: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.mse_loss(guess, target) + F.huber_loss(guess, weight) + (weight * guess).mean()


def _criterion(outputs: Any, batch: dict[str, Any]) -> Tensor:
    """It reads entries of its own: rewards, weights of samples, probabilities, boxes of targets."""
    guess, boxes = outputs.logits.squeeze(-1), torch.stack([target["boxes"] for target in batch["targets"]])
    wrong = (batch["weights"] * (guess - batch["rewards"]) ** 2).mean() + F.huber_loss(guess, batch["old_logprobs"])
    return wrong + (guess[:, None] * boxes).mean()


def _job(kind: str, recipe: Recipe) -> tuple[Callable[[], nn.Module], dict[str, Any], Callable[[nn.Module], Tensor]]:
    """What builds the model, its batch, and the loss of plain training: of a model in 16 bits, computed in fp32."""
    rows, dtype, generator = recipe.rows, _SHORT[recipe.precision], torch.Generator().manual_seed(0)
    near = 300 + 8 * torch.randn(rows, generator=generator)  # bf16 rounds them by up to 1, fp16 by up to 1/8
    if kind == "own":
        batch = {"x": torch.randn(rows, 5, 6, generator=generator), "start": torch.randn(rows, 6, generator=generator)}
        read = {"target": near, "weight": near / 7}
        cast = {name: value.to(dtype) for name, value in batch.items()}
        return _Regression, batch | read, lambda model: model.distance(model.guess(**cast).float(), **read)
    inputs = {name: value for name, value in recipe.batch(0).items() if name != "labels"}
    if kind == "labels":
        return recipe.model, {**inputs, "labels": near}, lambda model: F.mse_loss(_logits(model, inputs).view(-1), near)
    targets = [{"boxes": 100 * torch.rand(4, generator=generator)} for _ in range(rows)]
    batch = {**inputs, "rewards": near, "weights": near / 300, "old_logprobs": near / 290, "targets": targets}
    return recipe.model, batch, lambda model: _criterion(SimpleNamespace(logits=_logits(model, inputs)), batch)


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits.float()


def _keep_their_dtype(precision: str, kind: str, is_ordinary: bool, sizes: dict[str, int]) -> None:
    recipe, tolerance = Recipe(family="bert", head="regression", precision=precision, stages=2), tolerance_of(precision)
    build, batch, loss_of = _job(kind, recipe)
    torch.manual_seed(0)
    model, plain = build(), build()
    plain.load_state_dict(model.state_dict())
    for param in plain.parameters():
        param.data = param.data.to(_SHORT[precision])
    expected = loss_of(plain)
    expected.backward()
    plugin = HybridParallelPlugin(precision=precision, num_microbatches=2, initial_scale=1.0, **sizes)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = share_of(batch, plugin.dp_rank, plugin.dp_size)
    if is_ordinary:
        loss = model(**share)["loss"]
        booster.backward(loss, optimizer)
    else:
        criterion = _criterion if kind == "criterion" else None
        loss = booster.execute_pipeline(iter([share]), model, criterion=criterion, optimizer=optimizer).loss
    assert abs(loss.item() - expected.item()) < tolerance.loss / 10 * abs(expected.item()), (loss, expected)
    gradients = {name: param.grad for name, param in plain.named_parameters()}
    found = {name: each.cpu() for name, each in optimizer.full_gradients().items()}
    # Those of key biases are rounding alone.
    wrong = {name: tolerance.relative(found[name], gradients[name]) for name in found if "key.bias" not in name}
    assert wrong and max(wrong.values()) < tolerance.gradient, wrong


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "is_ordinary", "sizes"),
    [
        ("labels", False, {"pp_size": 2}),
        ("labels", True, {"pp_size": 2}),
        ("labels", True, {"tp_size": 2}),
        ("criterion", False, {"pp_size": 2}),
        # The simulated device has no recurrent layers.
        pytest.param("own", False, {}, marks=pytest.mark.slow),
        pytest.param("own", True, {}, marks=pytest.mark.slow),
    ],
)
def test_entries_keep_their_dtype(precision: str, kind: str, is_ordinary: bool, sizes: dict[str, int]) -> None:
    run_on_ranks(2, _keep_their_dtype, precision, kind, is_ordinary, sizes)


def _one_short_parameter_comes_first() -> None:
    torch.manual_seed(0)
    model = _Regression()
    model.gain.data = model.gain.data.bfloat16()
    batch = {"x": torch.randn(4, 5, 6), "start": torch.randn(4, 6), "target": torch.randn(4), "weight": torch.randn(4)}
    expected = model(**batch)["loss"].item()
    booster = Booster(plugin=HybridParallelPlugin())
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = share_of(batch, booster.plugin.dp_rank, booster.plugin.dp_size)
    found = booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss.item()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_the_dtype_of_a_model_is_not_that_of_its_first_parameter() -> None:
    run_on_ranks(2, _one_short_parameter_comes_first)


def _trained_router(precision: str) -> None:
    """Two micro-batches of a SwitchTransformers, whose router casts its classifier in every forward."""
    twin = twin_of(HeadClass("switch_transformers", "SwitchTransformersForConditionalGeneration"))
    plain, model = twin.build(), twin.build()
    batch = twin.batch(plain, 0, 4)
    expected = plain(**batch).loss
    expected.backward()
    booster = Booster(plugin=HybridParallelPlugin(precision=precision, num_microbatches=2))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    routers = {name: param for name, param in model.unwrap().named_parameters() if "router" in name}
    before = {name: param.detach().clone() for name, param in routers.items()}
    loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
    torch.testing.assert_close(loss.float().cpu(), expected, rtol=1e-5 if precision == "fp32" else 1e-2, atol=0)
    gradients = optimizer.full_gradients()
    optimizer.step()
    for name, param in routers.items():
        assert not torch.equal(param, before[name]) and param.dtype == before[name].dtype
        if precision == "fp32":
            torch.testing.assert_close(gradients[name].cpu(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_routers_that_cast_their_classifier_train_in_micro_batches_and_in_16_bit(precision: str) -> None:
    run_on_ranks(1, _trained_router, precision)
