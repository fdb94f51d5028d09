"""An optimizer that reads whole parameters (Lamb), with what else changes parameters and gradients around a step.

What breaks here first: fp32 masters of cut parameters, padding rows of a vocabulary, and clipping. Look in
`plugins/hybrid_parallel/zero/whole_parameters.py`; over many steps see
`zoo_tests/hybrid_parallel/zero/test_whole_parameters.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case


def _case(layout: str, precision: str = "fp64", sequence_parallel: bool = False, **options: Any) -> Case:
    recipe = Recipe(
        family="llama",
        head="causal_lm",
        optimizer="lamb",
        precision=precision,
        max_norm=0.05,
        steps=3,
        config=(("num_hidden_layers", 2), ("tie_word_embeddings", True)),
    )
    return Case(recipe=recipe, layout=layout, sequence_parallel=sequence_parallel, options=tuple(options.items()))


CASES = [
    _case("tp2", sequence_parallel=True, overlap_allgather=True),
    _case("pp2", make_vocab_size_divisible_by=64),
    _case("tp2", "bf16"),
    _case("tp2dp2", "fp16", debug=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow
def test_equals_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
