"""An actor and a critic in one job, each boosted by a plugin of its own with another layout: both are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "pad_token_id": 0, "num_labels": 1, "initializer_range": 0.2}
STEPS = 2


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    config = LlamaConfig(**_SIZES, **_HEADS)
    return LlamaForCausalLM(config).double(), LlamaForSequenceClassification(config).double()


def _batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 64, (STEPS, 4, 7), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": each, "returns": each.double().mean(1) / 64} for each in ids]


def _of_values(outputs: Any, batch: Any) -> torch.Tensor:
    return (outputs.logits[:, 0] - batch["returns"]).square().mean()


def differences(actor_layout: dict[str, int], critic_layout: dict[str, int]) -> list[float]:
    """Worst differences of weights from plain, after steps of both whose losses read each other's outputs."""
    plain_actor, plain_critic = _models()
    plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain_actor, plain_critic)]
    for batch in _batches():
        values = plain_critic(batch["input_ids"]).logits[:, 0]
        scores = plain_actor(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
        log_probs = scores.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        (-((batch["returns"] - values.detach())[:, None] * log_probs).sum() / log_probs.numel()).backward()
        (values - batch["returns"]).square().mean().backward()
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()

    boosters = [Booster(HybridParallelPlugin(**layout)) for layout in (actor_layout, critic_layout)]
    boosted = [
        each.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for each, model in zip(boosters, _models(), strict=True)
    ]
    (actor, actor_optimizer), (critic, critic_optimizer) = boosted

    def share(value: torch.Tensor, booster: Booster) -> torch.Tensor:
        return value.tensor_split(booster.plugin.dp_size)[booster.plugin.dp_rank]

    for batch in _batches():
        own, theirs = ({name: share(each, booster) for name, each in batch.items()} for booster in boosters)
        with torch.no_grad():  # replicas of the actor read values of other rows than those of the critic make
            values = boosters[1].execute_pipeline(theirs, critic, _of_values, return_outputs=True).outputs
        values = _gathered(values, boosters[1])
        log_probs = actor.token_log_probs({"input_ids": own["input_ids"]}).log_probs
        advantages = own["returns"] - share(values, boosters[0])
        boosters[0].backward((-(advantages[:, None] * log_probs).sum(), log_probs.numel()), actor_optimizer)
        boosters[1].execute_pipeline(theirs, critic, _of_values, critic_optimizer)
        for optimizer in (actor_optimizer, critic_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    return [
        max((each - expected.state_dict()[name]).abs().max().item() for name, each in booster.weights(model))
        for booster, model, expected in zip(boosters, (actor, critic), (plain_actor, plain_critic), strict=True)
    ]


def _gathered(outputs: Any, booster: Booster) -> torch.Tensor:
    """Return the values of all replicas, [rows], on all ranks."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    rows = None if outputs is None else outputs["logits"][:, 0]
    torch.distributed.all_gather_object(found, (booster.plugin.dp_rank, rows))
    known = {rank: each for rank, each in found if each is not None}
    return torch.cat([known[rank] for rank in sorted(known)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "actor", "critic"),
    [
        (2, {"tp_size": 2}, {}),
        (2, {"pp_size": 2}, {"zero_stage": 3}),
        (4, {"tp_size": 2, "pp_size": 2}, {"tp_size": 2}),
    ],
    ids=["tp2, dp2", "pp2, dp2 of stage 3", "tp2pp2, tp2dp2"],
)
def test_actor_and_critic_under_layouts_of_their_own(ranks: int, actor: dict, critic: dict) -> None:
    for gaps in run_on_ranks(ranks, differences, actor, critic):
        assert max(gaps) < 1e-12
