"""Which kernel runs the local part of experts: the grouped matmul needs rows of whole 16 bytes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from shardformer.policies.module_edits import share_expert_inputs


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(("features", "is_aligned"), [(16, True), (24, False), (32, True)])
def test_rows_that_are_aligned_in_fp32_alone_run_one_by_one(features: int, is_aligned: bool) -> None:
    """Half of 24 features are 48 bytes in fp32, and 24 after the weights are rounded to 16 bits."""
    config = MixtralConfig(hidden_size=32, intermediate_size=features, num_local_experts=2)
    config._experts_implementation = "grouped_mm"
    experts = MixtralExperts(config)
    share_expert_inputs(experts, dist.group.WORLD)
    assert experts.config._experts_implementation == ("grouped_mm" if is_aligned else "eager")
    assert config._experts_implementation == "grouped_mm", "other modules share it"
