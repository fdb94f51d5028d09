"""A model whose states exceed a budget of resident memory trains within it, with the bits of a run without a budget.

What breaks here first: gradients or states of all buckets in memory at one time. Look for a tensor from
`StateMemory.empty` that no `page_out` follows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory_budget import ResidentPeak, cgroup_root, join, memory_budget
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure, run_on_local_ranks
from zoo_tests.harness.ranks import under_load

_SIZE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_hidden_layers": 24}
_STEPS = 3
_STATES = 16  # bytes of a parameter, its gradient and the two states of AdamW
_BUDGET = 184 * 2**20  # with what a process changes of the memory that it was forked with


def _train(options: dict[str, Any], folder: Path, cgroup: Path | None = None) -> tuple[list[float], int, int]:
    """Train on one rank; return its losses, the rise of its resident memory, and the number of parameters."""
    if cgroup is not None:
        join(cgroup)
    peak = ResidentPeak()
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, **_SIZE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = sum(param.numel() for param in model.parameters())
    plugin = HybridParallelPlugin(zero_stage=3, zero_bucket_size_in_mb=4, max_norm=1.0, seed=0, **options)
    booster, losses = Booster(plugin=plugin), []
    model, optimizer = booster.boost(model, optimizer)[:2]
    for step in range(_STEPS):
        tokens = torch.randint(0, 500, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rise = peak.rise()
    booster.save_model(model, folder / "model")
    return losses, rise, count


@pytest.mark.slow
def test_trains_within_a_budget(tmp_path: Path) -> None:
    if cgroup_root() is None:
        pytest.skip("this process may not make memory cgroups")
    places = {name: str(tmp_path / "states") for name in ("offload_optimizer", "offload_parameters")}
    plain, offloaded = tmp_path / "plain", tmp_path / "offloaded"
    losses, without, count = run_on_local_ranks(_train, 1, {}, plain, timeout_s=under_load(120))[0]
    assert count * _STATES > 1.5 * _BUDGET
    assert without > 1.5 * _BUDGET
    with memory_budget(_BUDGET) as cgroup, pytest.raises(RankFailure, match="exit code -9"):
        run_on_local_ranks(_train, 1, {}, tmp_path / "killed", cgroup, timeout_s=under_load(120))
    with memory_budget(_BUDGET) as cgroup:
        found, within, _ = run_on_local_ranks(_train, 1, places, offloaded, cgroup, timeout_s=under_load(120))[0]
    assert found == losses
    assert within < _BUDGET
    expected, kept = (load_file(folder / "model" / "model.safetensors") for folder in (plain, offloaded))
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
