"""`offload_activations`: the same bits as without, whatever saves tensors and whenever they are needed again.

What breaks here first: memory that is used again before it is copied, and a copy of other values than those that were
saved. Look in `plugins/hybrid_parallel/offload/activations.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plugins.hybrid_parallel.offload import stores
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost

_HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head", "t5": "generation", "mixtral": "causal_lm"}
_CLIP = 0.05


def _case(family: str, layout: str, *, zero: int = 1, loop: bool = False, **options: Any) -> Case:
    fields = {name: options.pop(name) for name in ("precision", "config", "optimizer") if name in options}
    sp = options.pop("sp", False)
    recipe = Recipe(family=family, head=_HEADS[family], **{"precision": "fp32", **fields}, max_norm=_CLIP, rows=12)
    return Case(
        recipe=recipe,
        layout=layout,
        zero_stage=zero,
        ordinary_loop=loop,
        sequence_parallel=sp,
        options=tuple(options.items()),
    )


def _trained(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    """Losses, gradients of the first step, weights at the end, and how often a copy was read."""
    boosted = boost(case)
    losses, gradients = [], {}
    torch.manual_seed(5)
    with mock.patch.object(stores.FileCopy, "take", autospec=True, side_effect=stores.FileCopy.take) as reads:
        for step in range(case.recipe.steps):
            batch = boosted.share(case.recipe.batch(step))
            losses.append(
                (boosted.ordinary_backward if case.ordinary_loop else boosted.pipeline_backward)(batch).item()
            )
            gradients = gradients or {name: each.clone() for name, each in boosted.optimizer.full_gradients().items()}
            boosted.finish_step()
    with boosted.model.summon_full_params():
        weights = {name: each.detach().clone() for name, each in boosted.model.named_parameters()}
    return losses, gradients, weights, reads.call_count


def compare(case: Case, place: Path | str) -> int:
    """Train with and without; return how often a copy was read."""
    plain = _trained(case)
    found = _trained(dataclasses.replace(case, options=(*case.options, ("offload_activations", place))))
    assert plain[-1] == 0
    assert found[0] == plain[0], "losses"
    for what, mine, others in zip(("gradients", "weights"), found[1:3], plain[1:3], strict=True):
        differ = [name for name in others if not torch.equal(mine[name], others[name])]
        assert mine.keys() == others.keys() and not differ, f"{what} differ: {differ}"
    return found[-1]


@pytest.mark.parametrize(
    "case",
    [
        _case("bert", "single", config=(("num_hidden_layers", 4),)),
        _case("llama", "tp2", sp=True, loop=True, config=(("num_hidden_layers", 4),)),
        _case("gpt2", "pp2", optimizer="adamw"),
        _case("llama", "pp2", pp_style="zero_bubble"),
        _case("bert", "dp2", zero=3, gradient_checkpointing="full", config=(("num_hidden_layers", 4),)),
    ],
    ids=str,
)
def test_trains_to_the_same_bits(case: Case, tmp_path: Path) -> None:
    reads = run_on_ranks(case.sizes.world_size, compare, case, tmp_path / "activations")
    assert reads[0], "the last stage of a pipeline runs back at once what it has kept"
