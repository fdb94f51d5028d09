"""What expert parallelism shares with the rest of the plugin: refusals, loops, comparisons of ranks, what ranks hold.

What breaks here first: something that takes all replicas for copies of each other. Look at `replicate_axis` of
`plugins/hybrid_parallel/distributed/mesh.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from booster import Booster
from booster.errors import ConfigurationError, NonFiniteError, SynchronyError
from plugins.hybrid_parallel import HybridParallelConfig, HybridParallelPlugin
from plugins.hybrid_parallel.checkpoint.global_tensor import local_tensors
from plugins.hybrid_parallel.shard_report import shard_report, to_text
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer import record_module_init, spec_of
from shardformer.lazy import materialize
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.train_sharded import boost

_DOWN = "model.layers.0.mlp.experts.down_proj"


def _case(layout: str, ep_size: int = 2, family: str = "mixtral", config: dict[str, Any] | None = None) -> Case:
    head = "masked_lm" if family == "bert" else "causal_lm"
    recipe = Recipe(family=family, head=head, precision="fp32", config=tuple((config or {}).items()))
    return Case(recipe=recipe, layout=layout, options=(("ep_size", ep_size),))


# ----- refusals, in one sentence and on all ranks -----


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (_case("tp2"), r"ep_size=2 does not divide the dp_size\*cp_size=1\*1=1 ranks .*; use ep_size=1"),
        (_case("dp2", family="bert"), r"^ep_size=2 finds no experts in .* in BertForMaskedLM; use ep_size=1$"),
        (
            _case("dp2", config={"num_local_experts": 3, "num_experts": 3}),
            r"^ep_size=2 does not divide the 3 experts of 'model.layers.0.mlp.experts'; use 1 or 3$",
        ),
    ],
    ids=["replicas", "no experts", "odd experts"],
)
@distributed(2)
def test_layouts_that_do_not_fit(case: Case, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        boost(case)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {}, r"^expert_rank_capacity_factor=1.5 exchanges rows of ep_size ranks; use ep_size > 1, or .*=None$"),
        (
            {"ep_size": 2},
            {"experts_implementation": "eager"},
            r"^expert_rank_capacity_factor=1.5 needs experts in grouped .*layers.0.mlp.experts has others; use .*=None",
        ),
    ],
)
@distributed(2)
def test_slots_that_do_not_fit(options: dict[str, Any], config: dict[str, Any], message: str) -> None:
    plugin = HybridParallelPlugin(expert_rank_capacity_factor=1.5, **options)
    with pytest.raises(ConfigurationError, match=message):
        Booster(plugin=plugin).boost(_case("dp2", config=config).recipe.model())


@distributed(2)
def test_a_step_with_too_few_slots_is_refused() -> None:
    case = _case("dp2")
    boosted = boost(replace(case, options=(*case.options, ("expert_rank_capacity_factor", 0.1))))
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    said = r"layers.0.mlp.experts had \d+ rows too many for one rank under .*factor=0.1; use a larger one, or None"
    with pytest.raises(NonFiniteError, match=said):
        boosted.finish_step()


@distributed(2)
def test_capacity_of_experts_that_are_not_there() -> None:
    plugin = HybridParallelPlugin(expert_capacity_factor=1.5)
    with pytest.raises(ConfigurationError, match=r"expert_capacity_factor=1.5 finds no experts in .* BertFor"):
        Booster(plugin=plugin).boost(_case("dp2", family="bert").recipe.model())


@distributed(2)
def test_generation_by_a_loop_of_the_family_is_refused() -> None:
    model = boost(_case("dp2")).model.unwrap()
    type(model).generate, kept = lambda self, *args, **kwargs: None, type(model).generate
    try:
        with pytest.raises(RuntimeError, match="is a loop of its own, in which ep_size=2 .* with ep_size=1"):
            model.generate(torch.ones(1, 3, dtype=torch.long))
    finally:
        type(model).generate = kept


# ----- loops -----


def _accumulate(case: Case) -> None:
    """Two batches of other lengths, a pass without gradients in between, one reduction; and the same plainly."""
    boosted, plain = boost(case), case.recipe.model()
    first, second = (case.recipe.batch(step) for step in range(2))
    with boosted.booster.no_sync(boosted.model, boosted.optimizer):
        boosted.ordinary_backward(boosted.share(first))
    evaluated = boosted.booster.execute_pipeline(iter([boosted.share(second)]), boosted.model).loss
    boosted.ordinary_backward(boosted.share(second))
    losses = [plain(**batch).loss for batch in (first, second)]
    torch.autograd.backward(losses)
    torch.testing.assert_close(evaluated, losses[1].detach(), rtol=1e-5, atol=1e-6)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for name, gradient in boosted.optimizer.full_gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("dp2", 1), ("dp2", 2), *(pytest.param("tp2dp2", each, marks=pytest.mark.slow) for each in (1, 2))],
)
def test_gradients_of_two_batches_add_up(layout: str, stage: int) -> None:
    """Under stage 2 each pass is reduced, but not the gradients of experts that are on one rank alone."""
    run_on_ranks(_case(layout).sizes.world_size, _accumulate, _case(layout).but(zero_stage=stage))


@distributed(2)
def test_micro_batches_are_as_many_on_all_ranks() -> None:
    """Five samples in micro-batches of two: three on one rank, and so on the other, which has four."""
    case = _case("dp2").but(options=(("ep_size", 2), ("microbatch_size", 2)))
    boosted, plain = boost(case), case.recipe.model()
    batch = case.recipe.batch(0)
    assert len(next(iter(batch.values()))) == 9
    expected = plain(**batch).loss.item()
    assert boosted.pipeline_backward(boosted.share(batch)).item() == pytest.approx(expected, rel=1e-5)


def _train_to_the_last_sample(case: Case) -> None:
    """Nine samples, then two, then one, which leaves a replica or more with none."""
    boosted, plain = boost(case), case.recipe.model()
    optimizer, scheduler = case.recipe.training(plain)
    for step, rows in enumerate((9, 2, 1, 9)):
        batch = {name: value[:rows] for name, value in case.recipe.batch(step).items()}
        found = boosted.pipeline_backward(boosted.share(batch)).item()
        loss = plain(**batch).loss
        loss.backward()
        assert found == pytest.approx(loss.item(), rel=1e-5)
        expected = {name: param.grad for name, param in plain.named_parameters()}
        for name, gradient in boosted.optimizer.full_gradients().items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
            )
        boosted.finish_step()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["dp2", "pp2dp2", pytest.param("dp4", marks=pytest.mark.slow)])
def test_a_replica_without_samples_serves_the_others(layout: str) -> None:
    run_on_ranks(_case(layout).sizes.world_size, _train_to_the_last_sample, _case(layout))


# ----- what ranks hold -----


@pytest.mark.slow
@distributed(4)
def test_an_expert_that_differs_between_its_holders() -> None:
    case = _case("dp4").but(options=(("ep_size", 2), ("debug", True)))
    boosted = boost(case)
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    boosted.finish_step()
    parameters = dict(boosted.model.unwrap().named_parameters())
    if boosted.plugin.dp_rank == 3:
        parameters[_DOWN].data[0, 0, 0] += 0.25
    with pytest.raises(SynchronyError, match=rf"{_DOWN} differs between expert-data-parallel ranks 1 and 3"):
        boosted.booster.check_synchrony(boosted.model, boosted.optimizer)


def _held(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in boost(case).model.unwrap().named_parameters()}


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2dp2", marks=pytest.mark.slow)])
def test_played_ranks_hold_what_real_ones_do(layout: str) -> None:
    case = _case(layout)
    real = run_on_ranks(case.sizes.world_size, _held, case)
    config = HybridParallelConfig.from_options(**{**case.plugin_options, "dp_size": None})
    played = shard_report(case.recipe.model, config, case.sizes.world_size)
    assert sorted(each.rank for each in played) == list(range(len(real)))
    for each in played:
        assert {piece.name: piece.shape for piece in each.pieces} == real[each.rank]
    assert "ep 1, tp 0" in to_text(played)


def _lazily(case: Case) -> dict[str, torch.Tensor]:
    """Whole tensors of a model that is built without values, by name."""
    with record_module_init():
        model = case.recipe.model()
    plugin = HybridParallelPlugin(**case.plugin_options)
    model = Booster(plugin=plugin).boost(model)
    whole = {}
    for names, tensor in local_tensors(model, unique=False):
        full = assemble(tensor, tensor.detach(), plugin.grid.group(spec_of(tensor).axis))
        whole |= dict.fromkeys(names, full)
    return whole


@pytest.mark.slow
def test_a_recorded_model_draws_the_same_experts() -> None:
    case = _case("dp2")
    with record_module_init():
        model = case.recipe.model()
    materialize(model, seed=case.plugin_options["seed"])
    expected = model.state_dict()
    for whole in run_on_ranks(2, _lazily, case):
        assert whole.keys() == expected.keys()
        assert [name for name, value in whole.items() if not torch.equal(value, expected[name])] == []
