"""Options that meet: optimizers, clipping, tied weights, ZeRO, sequence parallelism, schedules, uneven micro-batches.

The full product would take hours. Each line below is one combination, chosen so that every pair of options that share
code meets once; all but one are fp64 and as exact as the matrix of `test_parity.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case

_HEADS = {
    "t5": "generation",
    "bart": "generation",
    "bert": "masked_lm",
    "llama": "causal_lm",
    "gpt2": "lm_head",
    "qwen3": "causal_lm",
}
_HEADS |= dict.fromkeys(("bloom", "gpt_neox", "mixtral", "opt"), "causal_lm")
_CLIP = 0.05  # far below the norms of these models: it bites at every step


def _case(family: str, layout: str, *, zero: int = 1, sp: bool = False, **recipe: Any) -> Case:
    options = tuple(recipe.pop("options", {}).items())
    recipe = {"head": _HEADS.get(family), **recipe, "config": tuple(recipe.get("config", {}).items())}
    if "optimizer" not in recipe and "dp" not in layout:
        recipe["steps"] = 1  # without a state or replicas, a second step only repeats the first
    return Case(
        recipe=Recipe(family=family, **recipe), layout=layout, zero_stage=zero, sequence_parallel=sp, options=options
    )


_EAGER = {"attn_implementation": "eager"}  # the default is SDPA
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}

_SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}
_FIVE_GROUPS = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 8}

_FLASH = {"enable_flash_attention": True}
_FUSED = {"enable_jit_fused": True}
_OVERLAP = {"enable_sequence_overlap": True}
_TILED = {"tiled_mlp": True}
_OPERATORS = {"gradient_checkpointing": "operators"}
_RECOMPUTED_OVERLAP = {**_OVERLAP, "gradient_checkpointing": "full"}

FAST = [
    _case("llama", "tp2pp2", sp=True, options=_OVERLAP),
    _case("llama", "tp2", options=_FLASH),
    # Clipping counts replicated, tied, sequence-parallel and copied parameters once.
    _case("llama", "tp4", sp=True, optimizer="momentum", max_norm=_CLIP, config=_TIED),
    _case("gpt2", "tp2pp2", sp=True, optimizer="adamw", max_norm=_CLIP),
    _case("bert", "pp2dp2", zero=0, optimizer="momentum", max_norm=_CLIP),
    _case("llama", "tp2", sp=True, options=_OPERATORS),
    # So many rows that a tile is one token of each, of a part of the sequence.
    _case("llama", "tp2", sp=True, rows=40, options=_TILED),
    # Micro-batches that differ in size, and schedules.
    _case("bert", "pp2", rows=5, optimizer="adamw", options={"num_microbatches": 3}),
    # Heads that the ranks do not divide: 2, 2, 1, 1, alone and in groups around a key/value head.
    _case("llama", "tp4", sp=True, optimizer="momentum", max_norm=_CLIP, config=_SIX_HEADS),
    # Parameters that are not trained or not used.
    _case("bert", "dp2", frozen=("bert.embeddings", "bert.encoder.layer.1"), optimizer="adamw"),
]

SLOW = [
    _case("gpt2", "tp2pp2", sp=True, rows=80, options={**_TILED, **_FUSED}),
    _case("t5", "tp2", sp=True, rows=40, options=_TILED, precision="fp32"),
    _case("gpt_neox", "tp4", sp=True, rows=40, options=_TILED, max_norm=_CLIP),
    _case("llama", "pp2dp2", zero=3, rows=160, options={**_TILED, "gradient_checkpointing": "full"}, optimizer="adamw"),
    _case("bert", "tp2", options=_OPERATORS),
    _case("gpt2", "tp2", options={**_OPERATORS, **_FUSED}),
    _case("opt", "tp2", sp=True, options=_OPERATORS, precision="fp32"),
    _case("t5", "tp2pp2", options=_OPERATORS, precision="fp32"),
    _case("mixtral", "tp2", sp=True, options=_OPERATORS, precision="fp32"),
    _case("swin", "tp2", head="image", options=_OPERATORS),
    _case("deberta_v2", "tp2", head="masked_lm", options=_OPERATORS),
    _case("llama", "cp2", options=_OPERATORS),
    _case("llama", "tp2pp2", sp=True, config=_EAGER, options={**_OPERATORS, **_OVERLAP}, precision="fp32"),
    _case("llama", "pp2", options={**_OPERATORS, "pp_style": "zero_bubble"}),
    _case("llama", "pp2dp2", zero=3, options=_OPERATORS, optimizer="adamw"),
    _case("bert", "tp2pp2", sp=True, options=_FUSED),
    _case("bert", "tp2pp2", options=_FLASH),
    _case("llama", "pp2", rows=7, config=_TIED, options={"pp_style": "gpipe", "num_microbatches": 2}),
    _case("gpt2", "pp2dp2", head="double_heads", frozen=("transformer.h.0",)),
    _case("bert", "tp2pp2", options={"gradient_checkpointing": "full"}),
    # fp32: transformers' eager softmax of this family turns the mask of fp64 into minus infinity, and padding into NaN.
    _case("llama", "tp2pp2", sp=True, config=_EAGER, optimizer="momentum", precision="fp32"),
    _case("llama", "tp4", optimizer="adamw", config={"hidden_size": 40, **_FIVE_GROUPS}),
    _case("qwen3", "tp2pp2", sp=True, max_norm=_CLIP, config=_FIVE_GROUPS),
    _case("mistral", "tp4", head="sequence", config=_SIX_HEADS, options=_FUSED),
    _case("vit", "tp4", head="image", config={"hidden_size": 48, "num_attention_heads": 6}),
    _case("llama", "tp2", options=_FUSED, max_norm=_CLIP),
    _case("llama", "pp2", options={**_FUSED, "gradient_checkpointing": "full"}),
    _case("gpt2", "tp2dp2", options=_FUSED),
    _case("gpt2", "dp2", options={"enable_all_optimization": True}),
    # All that the family can do: T5 has a sequence for each tower, and OPT's layers flatten batch and sequence.
    _case("t5", "tp2pp2", options={"enable_all_optimization": True}, precision="fp32"),
    _case("opt", "tp2", options={"enable_all_optimization": True}, precision="fp32"),
    # Two lengths at once, and regions that start at a linear, or at a block of experts.
    _case("t5", "tp4", sp=True, options=_RECOMPUTED_OVERLAP, precision="fp32"),
    _case("bart", "tp2pp2", sp=True, options=_RECOMPUTED_OVERLAP, max_norm=_CLIP),
    _case("gpt_neox", "tp2pp2", sp=True, options=_RECOMPUTED_OVERLAP, max_norm=_CLIP),
    _case("mixtral", "tp2", sp=True, options=_RECOMPUTED_OVERLAP, precision="fp32"),
    _case("bert", "tp4", sp=True, options=_OVERLAP, optimizer="momentum"),
    _case("bloom", "tp2", sp=True, options=_RECOMPUTED_OVERLAP, precision="fp32"),
    _case("gpt2", "tp4", sp=True, options=_OVERLAP, max_norm=_CLIP),
    _case("roberta_prelayernorm", "tp2", sp=True, options=_OVERLAP, head="masked_lm"),  # a norm reads its input
    _case("llama", "tp2", sp=True, options={**_OVERLAP, "gradient_checkpointing": "full"}),
    _case("qwen3", "tp4", sp=True, options=_OVERLAP, config={"attention_bias": True}),
    # fp32, since the fused norm does not round to it as the native one does.
    _case(
        "llama",
        "tp2pp2",
        options={"enable_all_optimization": True, "enable_sequence_overlap": True},
        sp=True,
        precision="fp32",
    ),
    _case("gpt2", "pp2", options=_FLASH),
    _case("gpt2", "tp2", options={"enable_flash_attention": "sdpa"}),
    _case("llama", "dp2", options=_FLASH),
    _case("llama", "tp2pp2", zero=0, optimizer="adamw", max_norm=_CLIP, config=_TIED),
    _case("llama", "pp4", optimizer="momentum", max_norm=_CLIP, config=_TIED),
    _case("llama", "tp2dp2", sp=True, optimizer="adamw", config=_TIED),
    _case("llama", "dp4", zero=0, optimizer="momentum", max_norm=_CLIP),
    _case("llama", "tp4", optimizer="adamw", max_norm=_CLIP),
    _case("llama", "tp4", sp=True, zero=0, config={"num_key_value_heads": 1}, max_norm=_CLIP),
    _case("llama", "tp2", options={"gradient_checkpointing": "full"}, sp=True),
    _case("bert", "tp2pp2", options={"gradient_checkpointing": 0.5}),
    _case("bert", "tp2pp2", options={"gradient_checkpointing": "selective"}, sp=True, config=_EAGER),
    _case("t5", "tp2pp2", options={"gradient_checkpointing": "selective"}),
    _case("llama", "tp2pp2", options={"gradient_checkpointing": "full"}, sp=True, config=_TIED),
    _case("llama", "tp2", config={"attention_bias": True, "mlp_bias": True}, sp=True, max_norm=_CLIP),
    _case("llama", "pp2dp2", options={"overlap_allgather": True}, optimizer="adamw"),
    # Norms of heads see the gradients of a rank's own heads, also of copies; fp32, since they round to it.
    _case("qwen3", "tp4", config={"num_key_value_heads": 2}, optimizer="momentum", precision="fp32", max_norm=_CLIP),
    _case(
        "qwen3", "tp2", sp=True, options={"enable_fused_normalization": True}, optimizer="momentum", precision="fp32"
    ),
    _case("bert", "tp2dp2", zero=0, optimizer="adamw", max_norm=_CLIP, config=_UNTIED),
    _case("bert", "tp2pp2", optimizer="momentum", sp=True, config=_UNTIED),
    _case("bert", "pp4", optimizer="adamw", max_norm=_CLIP),
    _case("bert", "pp4", zero=0, optimizer="momentum", options={"layers_per_stage": (1, 1, 1, 2)}),
    _case("bert", "dp4", optimizer="adamw", max_norm=_CLIP),
    _case("bert", "dp2", options={"overlap_communication": False}, optimizer="momentum", max_norm=_CLIP),
    _case("bert", "pp2dp2", rows=5, options={"microbatch_size": 2}, optimizer="momentum"),
    _case("bert", "tp2", options={"make_vocab_size_divisible_by": 1}, max_norm=_CLIP),
    _case("bert", "tp4", options={"make_vocab_size_divisible_by": 512}, sp=True),
    _case("bert", "pp2", head="pretraining", optimizer="adamw", max_norm=_CLIP),
    _case("gpt2", "pp2", optimizer="momentum", config=_UNTIED, max_norm=_CLIP),
    _case("gpt2", "pp4", zero=0, options={"pp_style": "gpipe"}, optimizer="adamw"),
    _case("gpt2", "tp2dp2", sp=True, optimizer="momentum", max_norm=_CLIP),
    _case("gpt2", "tp4", sp=True, optimizer="adamw", config=_UNTIED),
    _case("gpt2", "dp4", zero=0, optimizer="adamw"),
    _case("gpt2", "dp2", head="double_heads", optimizer="momentum", max_norm=_CLIP),
    _case("gpt2", "pp2dp2", rows=5, optimizer="adamw", max_norm=_CLIP, options={"num_microbatches": 2}),
    _case("gpt2", "pp2", options={"layers_per_stage": (4, 1), "gradient_checkpointing": "full"}),
    _case("bert", "tp2dp2", sp=True, config=_EAGER, optimizer="adamw"),
    _case("bert", "pp2", head="lm_head", config=_EAGER),
    _case("gpt2", "tp2pp2", config=_EAGER, max_norm=_CLIP),
    _case("gpt2", "tp2", config={"scale_attn_by_inverse_layer_idx": True}),
    # Tables of positions that are cut over heads, or shared by the stages, and parameters that every stage has.
    _case("beit", "tp2pp2", head="image_shared_bias", sp=True, optimizer="momentum", max_norm=_CLIP),
    _case("swinv2", "tp4", head="image", optimizer="momentum", max_norm=_CLIP),
    _case("swin", "tp2pp2", head="image", options={"gradient_checkpointing": "full"}, max_norm=_CLIP),
    _case("clip_towers", "pp4", head="contrastive", options={"num_microbatches": 1}, max_norm=_CLIP),
    _case("vit", "pp2dp2", head="masked_image", zero=0, optimizer="adamw"),
]


def _parameters() -> list:
    fast = [pytest.param(case, id=str(case)) for case in FAST]
    return fast + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("case", _parameters())
def test_options_together(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
