"""LoRA adapters train like on the unsharded model, whose weights stay what they were.

The adapters are those of a replica of peft, `zoo_tests.peft_like`, because peft cannot be installed where this runs.
What breaks here first: a matrix of an adapter that is not cut like its layer, a gradient that is a partial sum.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.case import Case, Recipe
from zoo_tests.compare import check_case

# Column, row, fused, copied and head projections; BERT's classifier is outside of the layers.
_TARGETS = {
    "llama": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "chatglm2": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "bert": ("query", "value", "output.dense", "classifier"),
}


def _case(family: str, layout: str, **options: object) -> Case:
    head = {"llama": "causal_lm", "gpt2": "lm_head", "chatglm2": "generation", "bert": "sequence"}[family]
    return Case(recipe=Recipe(family=family, head=head, adapters=_TARGETS[family]), layout=layout, **options)


@pytest.mark.parametrize("layout", ["tp2", "tp4", "pp2", "tp2pp2", "tp2dp2"])
@pytest.mark.parametrize("family", list(_TARGETS))
def test_adapters_train_like_plain_ones(family: str, layout: str, tmp_path: Path) -> None:
    check_case(_case(family, layout), tmp_path)


@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
@pytest.mark.parametrize("family", list(_TARGETS))
def test_adapters_on_cut_sequences(family: str, mode: str, tmp_path: Path) -> None:
    options = (("sequence_parallelism_mode", mode),)
    check_case(
        _case(family, "tp4" if family == "chatglm2" else "tp2", sequence_parallel=True, options=options), tmp_path
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_fused_operators_leave_adapters_in(family: str, tmp_path: Path) -> None:
    check_case(_case(family, "tp2", options=(("enable_jit_fused", True),)), tmp_path)
