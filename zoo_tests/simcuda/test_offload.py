"""Memory of ZeRO on the simulated CUDA device, and offload to the host with the numbers of plain training.

Stage 3 needs a GPU: torch itself gives the memory of a released parameter back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.hybrid_parallel.zero.reducer import KEPT_BUFFERS
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import DEVICE_VARIABLE, run_on_ranks
from zoo_tests.harness.train_sharded import boost
from zoo_tests.hybrid_parallel.zero.test_memory import most_whole_gradients
from zoo_tests.parity import test_zero_stages


def _case(stage: int, precision: str, optimizer: str) -> Case:
    recipe = Recipe(family="bert", head="masked_lm", precision=precision, optimizer=optimizer, max_norm=0.05)
    return Case(recipe=recipe, layout="dp2", zero_stage=stage, options=(("offload_optimizer", "cpu"),))


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32")])
def test_trains_like_plain_training(
    stage: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "simcuda")
    check_case(_case(stage, precision, "momentum"), tmp_path)


def _devices(case: Case) -> tuple[set[str], set[str], bool]:
    boosted = boost(case)
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    optimizer = boosted.optimizer
    held = {each.device.type for bucket in optimizer.buckets for each in (bucket.shard.values, bucket.shard_grads)}
    boosted.finish_step()
    held |= {state[key].device.type for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
    return held, {param.device.type for param in boosted.model.parameters()}, optimizer.param_groups[0]["fused"]


def test_states_are_on_the_host_and_adamw_steps_there_by_its_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "simcuda")
    assert run_on_ranks(2, _devices, _case(1, "bf16", "adamw")) == [({"cpu"}, {"cuda"}, True)] * 2


def test_stage_2_keeps_no_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no rank learns in time whether a sum is finite, gradients were kept for reports on those that are not."""
    monkeypatch.setenv(DEVICE_VARIABLE, "simcuda")
    test_zero_stages.test_no_whole_gradient_outlives_a_micro_batch()
    options = {"zero_stage": 2, "zero_bucket_size_in_mb": 0.05}
    for most, count in run_on_ranks(2, most_whole_gradients, options):
        assert most <= KEPT_BUFFERS < count
