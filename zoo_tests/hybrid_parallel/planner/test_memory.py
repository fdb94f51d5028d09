"""The planner's memory against what ranks hold: states to the byte, activations as torch counts them.

What breaks here first: what a layer saves for its backward pass, or which layers are taken to be alike. Look in
`plugins/hybrid_parallel/planner/rank_memory.py`, `profile.py`, `proxy_model.py` and `stage_map.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from booster import Booster
from plugins.hybrid_parallel import HybridParallelConfig, HybridParallelPlugin
from plugins.hybrid_parallel.planner.device import PRESETS
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.proxy_model import QuantisedBase
from plugins.hybrid_parallel.planner.rank_memory import StaticMemory, plan_buckets, static_of
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from shardformer.matmul.quantised import stored_tensors
from shardformer.utils.untraced import SavedResults
from zoo_tests.campaigns.memory_budgets import cases, train
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.case import Layout as LayoutOfRanks
from zoo_tests.harness.measured_memory import memory_of, static_memory
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost
from zoo_tests.hybrid_parallel.planner.test_memory_model import HEADS, LAYOUTS

_ROWS, _LENGTH = 3, 11
_HERE = PRESETS["H100"]


def _case(family: str, layout: str, **options: Any) -> Case:
    recipe = Recipe(
        family=family,
        head=HEADS.get(family, "causal_lm" if family in ("mixtral", "qwen3_moe") else "generation"),
        optimizer="adamw",
        precision=options.get("precision", "fp32").replace("fp8", "bf16"),  # of the model, and what is not a product
        adapters=options.pop("adapters", ()),
    )
    zero_stage = options.pop("zero_stage", 1)
    return Case(recipe=recipe, layout=layout, zero_stage=zero_stage, options=tuple(options.items()))


def _shards(config: HybridParallelConfig, replicas: int) -> Mapping[str, int]:
    zero, ep_size = config.zero, config.parallel.ep_size
    return Layout(replicas, 1, 1, ep_size=ep_size, zero_stage=zero.zero_stage, zero_size=zero.zero_size).shards


def _check_states(case: Case) -> None:
    """Of the first tensor-parallel rank of each place: the others have no more."""
    config = HybridParallelConfig.from_options(**{**case.plugin_options, "dp_size": None})
    world_size, precision = case.sizes.world_size, config.mixed_precision.precision
    pp_size, dp_size, cp_size, tp_size = config.parallel.mesh_shape(world_size)
    replicas = dp_size * cp_size
    planned = Predictor(ModelMap(case.recipe.model), Profiler(case.recipe.model, _LENGTH, _HERE, precision))
    profile = planned.profile(tp_size, False, config.parallel.ep_size)
    stages = planned.model.stages(pp_size * config.chunks_per_rank)
    shards = _shards(config, replicas)
    for rank in range(0, world_size, tp_size):
        place, replica = divmod(rank // tp_size, replicas)
        own = config.schedule.stages_of(place, pp_size, config.chunks_per_rank)
        held = plan_buckets({stage: stages[stage] for stage in own}, profile, config, shards, "cpu")
        counted = static_of(held, profile, config, replica)
        built = static_memory(case.recipe.model, config, world_size, rank)
        names = ("parameters", "masters", "gradients", "states")
        assert {name: getattr(counted, name) for name in names} == {name: getattr(built, name) for name in names}, rank


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if layout == "tp2pp2" else pytest.mark.slow)
        for family in HEADS
        for layout in LAYOUTS
    ],
)
def test_counted_states_are_the_built_ones(family: str, layout: str) -> None:
    _check_states(_case(family, layout))


_BF16 = {"precision": "bf16"}
_FURTHER = (
    ("llama", "pp2dp2", {**_BF16, "pp_style": "zbv", "num_microbatches": 4, "zero_stage": 3}),
    ("llama", "dp2", {"precision": "fp8", "zero_stage": 3}),
    ("gpt2", "pp2dp2", {**_BF16, "zero_stage": 2}),
    ("gpt2", "cp2dp2", {"zero_stage": 3}),
    ("llama", "dp2", {**_BF16, "zero_stage": 3, "adapters": ("q_proj", "down_proj")}),
    ("bert", "tp2dp2", {"precision": "fp16", "zero_stage": 0}),
    ("gpt2", "dp4", {**_BF16, "master_weights": False}),
    ("bert", "pp4", {"zero_bucket_size_in_mb": 0.01}),
    ("mixtral", "dp2", {"ep_size": 2}),
    ("mixtral", "cp2dp2", {"ep_size": 2, "zero_stage": 2}),
    ("qwen3_moe", "dp4", {**_BF16, "ep_size": 2, "zero_stage": 3}),
    ("mixtral", "pp2dp2", {"ep_size": 2, "zero_stage": 3, "adapters": ("q_proj",)}),
)


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("llama", "tp2dp2", {**_BF16, "zero_stage": 3}),
        ("mixtral", "tp2dp2", {**_BF16, "ep_size": 2, "zero_stage": 3}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in _FURTHER),
    ],
)
def test_counted_states_with_options(family: str, layout: str, options: dict[str, Any]) -> None:
    _check_states(_case(family, layout, **options))


def _states_of_rank(case: Case) -> StaticMemory:
    plugin = HybridParallelPlugin(**case.plugin_options)
    booster, model = Booster(plugin=plugin), case.recipe.model()
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.execute_pipeline(iter([case.recipe.batch(0)]), model, optimizer=optimizer)
    optimizer.step()
    return memory_of(model)


@pytest.mark.slow
def test_counted_states_within_groups_of_replicas() -> None:
    """With `zero_size` pairs of replicas share the states; on real ranks, which simulated ones cannot show."""
    case = _case("bert", "dp4", zero_stage=3, zero_size=2)
    profile = Profiler(case.recipe.model, _LENGTH, _HERE, "fp32").profile(1, False)
    config = HybridParallelConfig.from_options(**case.plugin_options)
    stages = dict(enumerate(ModelMap(case.recipe.model).stages(1)))
    held = plan_buckets(stages, profile, config, _shards(config, 4), "cpu")
    counted = [static_of(held, profile, config, replica) for replica in range(4)]
    assert [replace(each, buffers=0) for each in counted] == [
        replace(each, buffers=0) for each in run_on_ranks(4, _states_of_rank, case)
    ]
    assert counted[0] != counted[1] and counted[0] == counted[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("nf4-double", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
        ("int8", {"load_in_8bit": True}),
    ],
)
def test_a_quantised_base_has_the_bytes_of_bitsandbytes(kind: str, options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = (("hidden_size", 64), ("intermediate_size", 192))
    plain = Recipe(family="llama", head="causal_lm", precision="fp32", config=sizes)
    model = replace(plain, quantisation=tuple(options.items())).model()
    real: dict[str, int] = {}
    for name, tensor in stored_tensors(model):
        module = name.partition(".weight")[0].removesuffix(".SCB")
        real[module] = real.get(module, 0) + tensor.untyped_storage().nbytes()
    whole = plain.model().requires_grad_(False)
    base = QuantisedBase(kind)
    names = base.names(whole)
    assert len(names) == 7 * whole.config.num_hidden_layers
    for name, weight in whole.named_parameters():
        if name in names:
            assert base.stored_bytes(weight.numel(), len(weight)) == real[name.removesuffix(".weight")], name


def _saved(case: Case) -> int:
    """Bytes that the forward pass of one micro-batch keeps on this rank, each storage once, parameters left out."""
    boosted = boost(case)
    own = {param.untyped_storage()._cdata for param in boosted.model.unwrap().parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def result(context: SavedResults, compute: Callable[[], Any]) -> Any:
        return tree_map_only(Tensor, keep, save(context, compute))

    save = SavedResults._result
    vocab = boosted.model.origin.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(3))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedResults, "_result", result)
        boosted.pipeline_backward({"input_ids": ids, "labels": ids})
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("family", "layout", "sequence", "recomputation"),
    [
        ("llama", "tp2pp2", False, None),
        ("gpt2", "tp2", True, None),
        pytest.param("llama", "cp2", False, None, marks=pytest.mark.slow),
        pytest.param("gpt2", "cp2tp2", True, None, marks=pytest.mark.slow),
        pytest.param("bert", "pp2", False, None, marks=pytest.mark.slow),
        pytest.param("bert", "tp2", False, None, marks=pytest.mark.slow),
        pytest.param("bert", "tp2", True, None, marks=pytest.mark.slow),
        pytest.param("gpt2", "pp4", False, None, marks=pytest.mark.slow),
        pytest.param("gpt2", "pp2", False, "full", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp2", True, "operators", marks=pytest.mark.slow),
        pytest.param("llama", "tp2", False, "operators", marks=pytest.mark.slow),
        pytest.param("llama", "tp2", False, 0.5, marks=pytest.mark.slow),
        pytest.param("llama", "tp2pp2", True, None, marks=pytest.mark.slow),
        pytest.param("t5", "tp2pp2", False, None, marks=pytest.mark.slow),
        pytest.param("mixtral", "dp2", False, None, marks=pytest.mark.slow),
        pytest.param("mixtral", "tp2dp2", False, None, marks=pytest.mark.slow),
    ],
)
def test_activations_are_those_that_torch_saves(
    family: str, layout: str, sequence: bool, recomputation: str | float | None
) -> None:
    options = {"num_microbatches": 1, "enable_sequence_parallelism": sequence, "gradient_checkpointing": recomputation}
    sizes = LayoutOfRanks.named(layout)
    case = _case(family, layout, **options, ep_size=sizes.dp_size)
    measured = run_on_ranks(sizes.world_size, _saved, case)
    predictor = Predictor(
        ModelMap(case.recipe.model), Profiler(case.recipe.model, _LENGTH, _HERE, case.recipe.precision)
    )
    planned = Layout(
        dp_size=sizes.dp_size,
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        cp_size=sizes.cp_size,
        ep_size=sizes.dp_size,
        sequence=sequence,
        rows=_ROWS,
        recomputation=recomputation,
        precision=case.recipe.precision,
    )
    for stage, memory in enumerate(predictor.memories(planned)):
        real = measured[stage * sizes.tp_size * sizes.cp_size]
        assert memory.activations == pytest.approx(real, rel=0.10), f"stage {stage}"


@pytest.mark.slow
def test_plans_keep_within_their_budgets() -> None:
    """Three of the cases of `python -m zoo_tests.campaigns.memory_budgets`, two of them with offload."""
    _check_budgets(3, seed=4)


@pytest.mark.slow
def test_many_plans_keep_within_their_budgets() -> None:
    _check_budgets(4, seed=6)


def _check_budgets(count: int, seed: int) -> None:
    over = [(str(each.case), each.counted) for each in map(train, cases(count, seed)) if each.is_over]
    assert not over
