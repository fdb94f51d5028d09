"""The campaign of real sizes, at tiny ones: `python -m zoo_tests.campaigns.scale` takes an hour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zoo_tests.campaigns import scale

_TINY = {
    **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 251},
    **{"n_embd": 64, "n_layer": 2, "n_head": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", scale.SUBJECTS)
def test_losses_norms_and_weights_are_those_of_fp64(name: str) -> None:
    subject = scale.SUBJECTS[name]
    config = {key: _TINY.get(key, value) for key, value in subject.config.items()}
    tiny = replace(subject, config=config, lengths=(24, 17, 20, 9))
    rows = list(scale.measure(name, tiny, list(subject.layouts[:2])))
    assert [row["layout"] for row in rows] == list(subject.layouts[:2])
    assert all(scale.is_within(row) for row in rows), rows
