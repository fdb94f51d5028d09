"""What each loop enters: `model(**batch)`, on one stage and on several, and `execute_pipeline`.

What breaks here first: an option that one loop forgets. Look at `in_pass` in `plugins/hybrid_parallel/step/passes.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.matmul.float8 import Float8
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost
from zoo_tests.zoo import Batch

_LLAMA = Recipe(family="llama", head="causal_lm", precision="fp32", optimizer="momentum", max_norm=0.1)
_BERT = replace(
    _LLAMA,
    family="bert",
    head="masked_lm",
    config=(("hidden_dropout_prob", 0.2), ("attention_probs_dropout_prob", 0.2)),
)
_ONE = ("num_microbatches", 1)  # so that sums are the same bits
_FP8 = (_ONE, ("gradient_checkpointing", "full"), ("precision", "fp8"))
CASES = {
    "fp8": Case(recipe=_LLAMA, layout="tp2", options=_FP8),
    "fp8 in stages": Case(recipe=_LLAMA, layout="pp2", options=_FP8),
    "dropout": Case(recipe=_BERT, layout="tp2", options=(_ONE, ("gradient_checkpointing", "full"), ("debug", True))),
    "dropout in stages": Case(recipe=_BERT, layout="pp2", options=(_ONE, ("debug", True))),
    "experts": Case(
        recipe=replace(_LLAMA, family="mixtral"), layout="dp2", options=(_ONE, ("count_expert_load", True))
    ),
    "offload": Case(recipe=_LLAMA, layout="dp2", zero_stage=3, options=(_ONE, ("offload_activations", "folder"))),
}


def _enter(case: Case, in_pipeline: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train two steps, evaluate and, on one stage, generate; return what was seen in layers, and the numbers."""
    torch.manual_seed(3)
    boosted, seen = boost(case), []
    model = boosted.model
    backends = {getattr(module, "kernel", None) for module in model.unwrap().modules()}
    rounded = [backend for backend in backends if isinstance(backend, Float8)]

    def look(module: nn.Module, args: Any) -> None:
        watch, counts = model.trace.watch, model.token_counts
        seen.append(
            {
                "training": (module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
                "rounds weights once": [backend._weights is not None for backend in rounded],
                "gathers": model.gathers._depth > 0,
                "micro-batch": None if watch is None else watch._key,
                "counts experts": None if counts is None else counts.__self__._load._is_counting,
            }
        )

    layer = next(module for module in model.unwrap().modules() if type(module).__name__.endswith("Layer"))
    layer.register_forward_pre_hook(look)
    backward = boosted.pipeline_backward if in_pipeline else boosted.ordinary_backward
    numbers = {}
    for step in range(2):
        numbers[f"loss {step}"] = backward(boosted.share(case.recipe.batch(step))).detach().float()
        boosted.finish_step()
    if model.token_counts is not None:
        numbers |= model.expert_load()
    numbers |= {name: param.detach().clone() for name, param in model.state_dict().items()}
    model.eval()
    numbers["evaluation"] = _evaluate(boosted, boosted.share(case.recipe.batch(2)), in_pipeline)
    if case.sizes.pp_size == 1 and hasattr(model.unwrap(), "generate"):
        batch = boosted.share(case.recipe.batch(0))
        model.generate(**{name: batch[name] for name in ("input_ids", "attention_mask")}, max_new_tokens=1)
    return seen, numbers


def _evaluate(boosted: Boosted, batch: Batch, in_pipeline: bool) -> torch.Tensor:
    if in_pipeline:
        return boosted.booster.execute_pipeline(iter([batch]), boosted.model).loss.float()
    with torch.no_grad():
        return boosted.model(**batch).loss.float()


def _compare(case: Case, folder: Path) -> None:
    options = tuple((name, str(folder) if value == "folder" else value) for name, value in case.options)
    (seen, numbers), (expected, others) = (_enter(replace(case, options=options), each) for each in (False, True))
    assert seen == expected
    assert all(all(each["rounds weights once"]) for each in seen)
    assert numbers.keys() == others.keys()
    for name, value in numbers.items():
        torch.testing.assert_close(
            value, others[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", CASES)
def test_both_loops_enter_the_same(name: str, tmp_path: Path) -> None:
    run_on_ranks(LAYOUTS[CASES[name].layout].world_size, _compare, CASES[name], tmp_path)
