"""Models that are not sharded.

What breaks here first: a buffer in fp32 that a layer in 16 bit reads. Look in `plugins/hybrid_parallel/setup/model.py`
(`shard_model`, `_cast`).
"""

from __future__ import annotations

import torch

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES


@distributed(1)
def test_a_whole_model_in_16_bit_reads_its_buffers_in_the_dtype_of_its_weights() -> None:
    """Swinv2 computes position biases from coordinates in a buffer, and buffers keep their precision."""
    family = FAMILIES["swinv2"]
    batch = family.batch(family.main_head, 0, 4, torch.float32)
    plain = family.build(family.main_head, torch.float32)
    expected = plain(**batch).loss
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model, optimizer = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    found = booster.execute_pipeline(batch, model, optimizer=optimizer).loss
    torch.testing.assert_close(found, expected.detach(), rtol=2e-2, atol=2e-2)
