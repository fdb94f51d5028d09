"""An asynchronous loop: an actor and a critic in one job, each boosted by a plugin of its own with another layout.

A copy of the actor, which is a step behind, gives the log-probabilities that importance weights are of: the stream of
weights begins before a step and goes on after it. Samples of two steps are replayed in a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from booster import Booster
from booster.data.stream import PackingCollator, pack
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "pad_token_id": 0, "num_labels": 1, "initializer_range": 0.2}
STEPS = 3


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    config = LlamaConfig(**_SIZES, **_HEADS)
    return LlamaForCausalLM(config).double(), LlamaForSequenceClassification(config).double()


def _batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 64, (STEPS, 4, 7), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": each, "returns": each.double().mean(1) / 64} for each in ids]


def _of_values(outputs: Any, batch: Any) -> torch.Tensor:
    return (outputs.logits[:, 0] - batch["returns"]).square().mean()


def _log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities by a plain model, [rows, tokens - 1]."""
    return model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def _samples(ids: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Samples of a replay buffer; nothing is predicted of a first token."""
    labels = torch.cat([torch.full_like(ids[:, :1], -100), ids[:, 1:]], 1)
    made = zip(ids, labels, old, advantages[:, None].expand_as(old), strict=True)
    return [dict(zip(("input_ids", "labels", "old", "advantages"), each, strict=True)) for each in made]


def _off_policy(new: torch.Tensor, samples: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The sum of an importance-weighted loss over tokens of samples, [tokens]."""
    old, advantages = (torch.cat([each[name] for each in samples]) for name in ("old", "advantages"))
    return -((new - old).exp().clamp(max=2.0) * advantages).sum()


def _plain() -> tuple[nn.Module, nn.Module]:
    """Train both in one process."""
    actor, critic = _models()
    optimizers, behind, replay = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (actor, critic)], actor, []
    for batch in _batches():
        ids, before = batch["input_ids"], deepcopy(actor)
        with torch.no_grad():
            values, old = critic(ids).logits[:, 0], _log_probs(behind, ids)
        replay = [*replay[-len(ids) :], *_samples(ids, old, batch["returns"] - values)]
        new = _log_probs(actor, torch.stack([each["input_ids"] for each in replay])).flatten()
        (_off_policy(new, replay) / len(new)).backward()
        (critic(ids).logits[:, 0] - batch["returns"]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        behind = before
    return actor, critic


def differences(actor_layout: dict[str, int], critic_layout: dict[str, int]) -> list[float]:
    """Worst differences of weights from plain, after steps of both whose losses read each other's outputs."""
    boosters = [Booster(HybridParallelPlugin(**layout)) for layout in (actor_layout, critic_layout)]
    boosted = [
        each.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for each, model in zip(boosters, _models(), strict=True)
    ]
    (actor, actor_optimizer), (critic, critic_optimizer) = boosted
    behind, replay = _models()[0], []

    def share(value: torch.Tensor, booster: Booster) -> torch.Tensor:
        return value.tensor_split(booster.plugin.dp_size)[booster.plugin.dp_rank]

    for batch in _batches():
        own, theirs = ({name: share(each, booster) for name, each in batch.items()} for booster in boosters)
        weights = boosters[0].weights(actor, bucket_size_in_mb=0.02)
        first = next(weights)
        with torch.no_grad():  # replicas of the actor read values of other rows than those of the critic make
            values = boosters[1].execute_pipeline(theirs, critic, _of_values, return_outputs=True).outputs
            old = _log_probs(behind, own["input_ids"])
        advantages = own["returns"] - share(_gathered(values, boosters[1]), boosters[0])
        replay = [*replay[-len(old) :], *_samples(own["input_ids"], old, advantages)]
        packed = pack(replay, max_tokens=sum(len(each["input_ids"]) for each in replay), shuffle=False)
        entries = PackingCollator()([packed[0]])
        new = actor.token_log_probs(entries).log_probs[entries["labels"][:, 1:] != -100]
        loss = _off_policy(new, [replay[sample] for sample, _, _ in packed.rows[0]])
        boosters[0].backward((loss, new.numel()), actor_optimizer)
        boosters[1].execute_pipeline(theirs, critic, _of_values, critic_optimizer)
        for optimizer in (actor_optimizer, critic_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        behind.load_state_dict(dict(chain([first], weights)))  # those of before the step
    return [
        max((each - expected.state_dict()[name]).abs().max().item() for name, each in booster.weights(model))
        for booster, model, expected in zip(boosters, (actor, critic), _plain(), strict=True)
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
def test_an_asynchronous_loop_is_that_of_one_process(ranks: int, actor: dict, critic: dict) -> None:
    for gaps in run_on_ranks(ranks, differences, actor, critic):
        assert max(gaps) < 1e-12
