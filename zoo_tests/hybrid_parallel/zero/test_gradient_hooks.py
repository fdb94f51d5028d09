"""Hooks on the gradients of parameters see what they see in plain torch, whatever is cut, reduced or accumulated.

What breaks here first: a hook that runs on a share of the gradient. Look in
`plugins/hybrid_parallel/zero/reducer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import Recipe, share_of
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of

_RECIPE = Recipe(family="llama", head="causal_lm", config=(("tie_word_embeddings", True), ("num_hidden_layers", 2)))
_LAYOUTS = {
    "tp2": {"tp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2, "num_microbatches": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 3},
}


def _hook(model: nn.Module) -> list[Tensor]:
    """None of these is linear in the gradient, but the first; what the last saw."""
    seen: list[Tensor] = []
    named = dict(model.named_parameters())

    def rows(gradient: Tensor) -> Tensor:
        return gradient * (torch.arange(len(gradient)) % 3 > 0).unsqueeze(-1)

    named["model.embed_tokens.weight"].register_hook(rows)
    named["model.layers.0.self_attn.q_proj.weight"].register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    named["model.layers.1.mlp.down_proj.weight"].register_hook(lambda gradient: gradient / gradient.norm())
    removed = named["model.layers.1.mlp.up_proj.weight"].register_hook(torch.zeros_like)
    named["model.norm.weight"].register_hook(seen.append)
    removed.remove()
    return seen


def _train(model: nn.Module, backward: Callable[[dict[str, Any]], None], optimizer: torch.optim.Optimizer) -> None:
    for first in (0, 2):  # accumulated over two batches
        for step in (first, first + 1):
            backward(_RECIPE.batch(step))
        optimizer.step()
        optimizer.zero_grad()


def _plain() -> tuple[dict[str, Tensor], list[Tensor]]:
    model = _RECIPE.model()
    seen = _hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, lambda batch: loss_of(model, _RECIPE.zoo_head, batch).backward(), optimizer)
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}, seen


def _boosted(layout: str, ordinary: bool) -> tuple[dict[str, tuple[Tensor, Any]], list[Tensor]]:
    booster = Booster(plugin=HybridParallelPlugin(**_LAYOUTS[layout]))
    model = _RECIPE.model()
    seen = _hook(model)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plugin = booster.plugin

    def backward(batch: dict[str, Any]) -> None:
        share = share_of(batch, plugin.dp_rank, plugin.dp_size)
        if ordinary:
            with booster.no_sync(model, optimizer):
                booster.backward(model(**share).loss, optimizer)
        else:
            booster.execute_pipeline(iter([share]), model, optimizer=optimizer)

    _train(model, backward, optimizer)
    named = model.unwrap().named_parameters()
    return {name: (value.detach().clone(), spec_of(value)) for name, value in named}, seen


@pytest.mark.parametrize(
    ("layout", "ordinary"), [("tp2", True), ("dp2", True), ("dp2", False), ("pp2", False)],
    ids=["tp2-ordinary", "dp2-ordinary", "dp2", "pp2"],
)  # fmt: skip
def test_hooks_see_the_gradients_of_plain_torch(layout: str, ordinary: bool) -> None:
    expected, all_seen = _plain()
    for found, seen in run_on_ranks(2, _boosted, layout, ordinary):
        for name, (value, spec) in found.items():
            piece = spec.shard(expected[name])
            torch.testing.assert_close(value, piece, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        if "model.norm.weight" in found:  # it lies on the last stage
            torch.testing.assert_close(seen, all_seen, rtol=1e-9, atol=1e-12)


@distributed(2)
def test_hooks_that_cannot_hold_are_refused_on_every_rank() -> None:
    def refused(model: nn.Module, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            booster = Booster(plugin=HybridParallelPlugin(tp_size=2))
            model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            booster.execute_pipeline(iter([_RECIPE.batch(0)]), model, optimizer=optimizer)

    model = _RECIPE.model()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    refused(model, r"model.embed_tokens.weight has a hook of register_post_accumulate_grad_hook.*use register_hook")
    model = _RECIPE.model()
    if dist.get_rank() == 0:
        model.model.norm.weight.register_hook(lambda gradient: None)
    refused(model, r"hooks on the gradients of different parameters.*register the same hooks on every rank")
    model = _RECIPE.model()
    model.model.norm.weight.register_hook(lambda gradient: gradient[:2])
    refused(model, r"the gradient hook of model.norm.weight returned a tensor of shape \(2,\)")
