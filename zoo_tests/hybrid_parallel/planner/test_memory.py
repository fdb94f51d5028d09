"""The planner's memory beside what ranks hold: states to the byte, activations as torch counts them.

What breaks here first: what a layer saves for its backward pass, or which layers are taken to be alike. Look in
`plugins/hybrid_parallel/planner/memory_model.py`, `profile.py`, `pruned_model.py` and `stage_map.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.hybrid_parallel import HybridParallelConfig
from plugins.hybrid_parallel.planner.device import PRESETS
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.memory_model import count_static
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.measured_memory import static_memory
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost
from zoo_tests.hybrid_parallel.planner.test_memory_model import HEADS, LAYOUTS

_ROWS, _LENGTH = 3, 11
_HERE = PRESETS["A100"]


def _case(family: str, layout: str, **options: Any) -> Case:
    precision = options.get("precision", "fp32")
    recipe = Recipe(family=family, head=HEADS.get(family, "generation"), optimizer="adamw", precision=precision)
    zero_stage = options.pop("zero_stage", 1)
    return Case(recipe=recipe, layout=layout, zero_stage=zero_stage, options=tuple(options.items()))


def _check_states(case: Case) -> None:
    """Of the first tensor-parallel rank of each place: the others have no more."""
    config = HybridParallelConfig.from_options(**{**case.plugin_options, "dp_size": None})
    world_size, precision = case.sizes.world_size, config.mixed_precision.precision
    pp_size, dp_size, cp_size, tp_size = config.parallel.mesh_shape(world_size)
    replicas = dp_size * cp_size
    profile = Profiler(case.recipe.model, _LENGTH, _HERE, precision).profile(tp_size, False)
    stages = ModelMap(case.recipe.model).stages(pp_size * config.chunks_per_rank)
    for rank in range(0, world_size, tp_size):
        place, replica = divmod(rank // tp_size, replicas)
        own = config.schedule.stages_of(place, pp_size, config.chunks_per_rank)
        counted = count_static({stage: stages[stage] for stage in own}, profile, config, replicas, replica)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        pytest.param("llama", "tp2dp2", {"zero_stage": 3, "precision": "bf16"}, marks=()),
        ("llama", "pp2dp2", {"precision": "bf16", "pp_style": "zbv", "num_microbatches": 4, "zero_stage": 3}),
        ("gpt2", "pp2dp2", {"precision": "bf16", "zero_stage": 2}),
        ("bert", "dp4", {"zero_stage": 3, "zero_size": 2}),
        ("gpt2", "cp2dp2", {"zero_stage": 3}),
        ("llama", "pp2dp2", {"precision": "bf16", "pp_style": "zbv", "num_microbatches": 4}),
        ("bert", "tp2dp2", {"precision": "fp16", "zero_stage": 0}),
        ("gpt2", "dp4", {"precision": "bf16", "master_weights": False}),
        ("bert", "pp4", {"zero_bucket_size_in_mb": 0.01}),
    ],
)
def test_counted_states_with_options(family: str, layout: str, options: dict[str, Any]) -> None:
    _check_states(_case(family, layout, **options))


def _saved(case: Case) -> int:
    """Bytes that the forward pass of one micro-batch keeps on this rank, each storage once, parameters left out."""
    boosted = boost(case)
    own = {param.untyped_storage()._cdata for param in boosted.model.unwrap().parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    vocab = boosted.model.origin.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        boosted.pipeline_backward({"input_ids": ids, "labels": ids})
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("family", "layout", "sequence", "recomputation"),
    [
        ("llama", "tp2pp2", False, None),
        ("gpt2", "tp2", True, None),
        pytest.param("bert", "pp2", False, None, marks=pytest.mark.slow),
        pytest.param("bert", "tp2", False, None, marks=pytest.mark.slow),
        pytest.param("bert", "tp2", True, None, marks=pytest.mark.slow),
        pytest.param("gpt2", "pp4", False, None, marks=pytest.mark.slow),
        pytest.param("gpt2", "pp2", False, "full", marks=pytest.mark.slow),
        pytest.param("llama", "tp2", False, 0.5, marks=pytest.mark.slow),
        pytest.param("llama", "tp2pp2", True, None, marks=pytest.mark.slow),
        pytest.param("t5", "tp2pp2", False, None, marks=pytest.mark.slow),
    ],
)
def test_activations_are_those_that_torch_saves(
    family: str, layout: str, sequence: bool, recomputation: str | float | None
) -> None:
    options = {"num_microbatches": 1, "enable_sequence_parallelism": sequence, "gradient_checkpointing": recomputation}
    case = _case(family, layout, **options)
    sizes = case.sizes
    measured = run_on_ranks(sizes.world_size, _saved, case)
    predictor = Predictor(
        ModelMap(case.recipe.model), Profiler(case.recipe.model, _LENGTH, _HERE, case.recipe.precision)
    )
    planned = Layout(
        dp_size=1,
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        sequence=sequence,
        rows=_ROWS,
        recomputation=recomputation,
        precision=case.recipe.precision,
    )
    for stage, memory in enumerate(predictor.memories(planned)):
        real = measured[stage * sizes.tp_size]
        assert memory.activations == pytest.approx(real, rel=0.10), f"stage {stage}"
