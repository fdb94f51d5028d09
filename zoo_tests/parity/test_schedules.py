"""Every pipeline schedule trains to the numbers of plain training, with all that meets a schedule.

What breaks here first: a stage that sees another's modules, gradients of weights that are put off and forgotten, and
buckets that are reduced before all stages of a rank have added to them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head", "t5": "generation"}
SEVERAL_STAGES = [name for name, schedule in SCHEDULES.items() if schedule.chunks != 1]
_CLIP = 0.05
_DEPTH = {"bert": "num_hidden_layers", "llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers"}


def _case(family: str, layout: str, style: str, *, zero: int = 1, sp: bool = False, **recipe: Any) -> Case:
    options = {"pp_style": style, "num_microbatches": 4, **recipe.pop("options", {})}
    recipe["config"] = tuple(recipe.get("config", {}).items())
    return Case(
        recipe=Recipe(family=family, head=recipe.pop("head", HEADS[family]), **recipe),
        layout=layout,
        zero_stage=zero,
        sequence_parallel=sp,
        options=tuple(options.items()),
    )


def _deep(family: str, layers: int = 9) -> dict[str, int]:
    return {_DEPTH[family]: layers}


def _cases() -> list:
    fast, slow = [], []
    for number, style in enumerate(SEVERAL_STAGES):
        fast += [
            _case("llama", "pp2", style),
            _case("gpt2", "pp2dp2", style, rows=10, optimizer="adamw", max_norm=_CLIP),
        ]
        # The runtime does not know families: each meets every schedule once, in turn with what differs.
        first, second, third, fourth = (list(HEADS)[(number + turn) % 4] for turn in range(4))
        slow += [
            # Numbers that nothing divides.
            _case(first, "pp2", style, rows=7, options={"num_microbatches": 7}, max_norm=_CLIP),
            _case(second, "pp2dp2", style, zero=0, optimizer="momentum", max_norm=_CLIP),
            _case(third, "tp2pp2", style, sp=True, optimizer="adamw", rows=9),
            _case(fourth, "pp4", style, config=_deep(fourth), rows=8, options={"num_microbatches": 8}),
            _case(second, "pp2", style, options={"num_microbatches": 1}),
            _case(third, "pp2", style, options={"gradient_checkpointing": "full"}),
            _case(first, "pp2", style, precision="bf16", optimizer="momentum"),
            _case("bert", "pp2", style, options={"layers_per_stage": (2, 1, 1, 1)}),
            _case("llama", "pp2dp2", style, config={"tie_word_embeddings": True}, optimizer="adamw", max_norm=_CLIP),
            _case("gpt2", "tp2pp2", style, options={"enable_jit_fused": True}, max_norm=_CLIP),
            _case("gpt2", "pp2", style, precision="fp16", optimizer="momentum", max_norm=_CLIP),
            _case("llama", "pp2", style, adapters=("q_proj", "v_proj"), optimizer="momentum"),
            _case("bert", "pp2dp2", style, frozen=("bert.embeddings", "bert.encoder.layer.1"), optimizer="adamw"),
            _case("llama", "tp2pp2", style, sp=True, options={"enable_sequence_overlap": True}),
            _case("bert", "pp2dp2", style, options={"overlap_communication": False}, max_norm=_CLIP),
        ]
    # A bucket for each parameter: the tied one may be reduced only once both of its stages have added to it.
    fast.append(_case("gpt2", "pp2dp2", "zbv", options={"zero_bucket_size_in_mb": 0.001}))
    slow += [
        _case("llama", "pp2", "interleaved", config=_deep("llama"), options={"num_model_chunks": 4}),
        _case("bert", "pp2dp2", "interleaved", config=_deep("bert"), options={"num_model_chunks": 3}, max_norm=_CLIP),
        _case("gpt2", "pp2", "zero_bubble", config=_deep("gpt2"), options={"num_model_chunks": 3}),
        _case("gpt2", "pp4", "zero_bubble", options={"num_model_chunks": 1}, optimizer="momentum"),
    ]
    return [
        *(pytest.param(case, id=str(case)) for case in fast),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow),
    ]


@pytest.mark.parametrize("case", _cases())
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
