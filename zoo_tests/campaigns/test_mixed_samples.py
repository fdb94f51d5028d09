"""A sample of the classes whose samples are computed apart, or not.

What breaks here first: a family whose new release routes or normalises over the batch. Look in
`plugins/hybrid_parallel/setup/input_checks.py`. `python -m zoo_tests.campaigns.mixed_samples` checks every class.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.campaigns.mixed_samples import mixes_samples, says_so


@pytest.mark.parametrize(
    ("family", "name", "is_mixed", "changes"),
    [
        ("doge", "DogeForCausalLM", True, {"is_moe": True, "num_experts": 16}),  # by the router
        ("doge", "DogeForCausalLM", False, {"is_moe": False}),
        ("nllb_moe", "NllbMoeForConditionalGeneration", True, {}),  # by places of experts
        ("nllb_moe", "NllbMoeForConditionalGeneration", False, {"expert_capacity": 1_000_000}),
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", False, {}),  # places for each sample
        ("xlnet", "XLNetLMHeadModel", True, {"bi_data": True}),  # by halves
        ("resnet", "ResNetForImageClassification", True, {}),  # by batch norms
    ],
)
def test_classes_that_mix_samples_are_told(family: str, name: str, is_mixed: bool, changes: dict[str, object]) -> None:
    twin = twin_of(HeadClass(family, name))
    twin = replace(twin, config=type(twin.config)(**{**twin.config.to_dict(), **changes}))
    try:
        found = mixes_samples(twin)
    except TypeError as error:  # the experts of Doge in 5.17 return a tuple to a layer that takes a tensor
        pytest.skip(f"{name} does not run plainly: {error}")
    assert found == is_mixed == says_so(twin.build())
