"""The verified plan of a user's own module: exact parts stay, parts that differ are dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import ConfigurationError, verify
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.verify.propose import OwnModel, propose_verified, share_cut
from zoo_tests.harness.ranks import run_on_ranks, under_load
from zoo_tests.shardformer.policies.test_proposed import Model


class Tagger(nn.Module):
    """A module of nobody's family that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Model()

    def forward(self, tokens: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.body(tokens)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Misleading(Tagger):
    """Reads its number of heads in a way that no attribute corrects: the attention is not cut."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.body.blocks:
            block["attention"].forward = _fixed_heads.__get__(block["attention"])


def _fixed_heads(self: Any, x: Tensor) -> Tensor:
    query, key, value = self.all_three(x).chunk(3, dim=-1)
    query, key, value = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (query, key, value))
    return self.out((((query @ key.mT) / query.shape[-1]).softmax(-1) @ value).transpose(1, 2).flatten(2))


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(70, (2, 5, 7), generator=generator)
    return {"tokens": tokens, "labels": labels}


def _run(function: Any, world_size: int, *arguments: Any, timeout_s: float) -> list[Any]:
    return run_on_ranks(world_size, function, *arguments, timeout_s=timeout_s)


def _proposal(model_fn: Any) -> Any:
    return propose_verified(OwnModel(model_fn, _batch(), torch.float64), 5, timeout_s=under_load(90), run=_run)


def verify_on_rank(model_fn: Any, plan: Any) -> bool:
    return verify(model_fn, _batch(), HybridParallelPlugin(tp_size=2, custom_policy=plan.policy())).equal


@pytest.mark.slow
def test_an_own_module_trains_exactly_with_its_proposed_plan() -> None:
    plan = _proposal(Tagger)
    assert {path.rpartition(".")[2] for path in plan.styles} == {
        *("all_three", "bias", "head_scale", "out", "drop", "both", "down", "table", "head")
    }
    assert plan.local == {"body.blocks.*.attention": ("h", "width")}
    assert run_on_ranks(2, verify_on_rank, Tagger, plan) == [True, True]
    share = share_cut(Tagger, _batch(), custom_policy=plan.policy())
    assert share.parameters > 0.9 and share.flops > 0.9


def test_a_part_that_differs_is_dropped() -> None:
    plan = _proposal(Misleading)
    assert "body.blocks.*.mlp.down" in plan.styles and "body.blocks.*.attention.out" not in plan.styles


def test_a_model_that_does_not_run_is_one_sentence() -> None:
    subject = OwnModel(Tagger, {"tokens": _batch()["tokens"]}, torch.float64)
    with pytest.raises(
        ConfigurationError, match=r"Tagger does not run with derivatives \(TypeError: .*labels.*TPInfo$"
    ):
        propose_verified(subject, 5, timeout_s=under_load(90), run=_run)
