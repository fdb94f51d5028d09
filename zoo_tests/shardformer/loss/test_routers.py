"""The load-balancing loss of routers is part of the loss where it is asked for, and never dropped in silence.

It is no mean of those of parts: it is that of the whole batch, or refused. Look in `shardformer/loss/terms.py`, and
for stages and micro-batches in `plugins/hybrid_parallel/loss/step_loss.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.loss.terms import routers_are_asked
from zoo_tests.harness.case import share_of
from zoo_tests.harness.ranks import run_on_ranks

Report = tuple[float, dict[str, Tensor]]  # the loss, and gradients by name

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def _model(**config: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 2.0}
    return MixtralForCausalLM(MixtralConfig(**_SIZES, **experts, num_hidden_layers=4, vocab_size=67, **config))


def _batch(**extra: Any) -> dict[str, Any]:
    ids = torch.randint(1, 67, (4, 13), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), **extra}


_EXCHANGED = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}

# Said by the configuration, or for one batch.
_SAID: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"output_router_logits": True}, {}),
    ({}, {"output_router_logits": True}),
    ({"output_router_logits": True}, {"output_router_logits": False}),
]


def _train(options: dict[str, Any], config: dict[str, Any], extra: dict[str, Any], ordinary: bool = False) -> Report:
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = _model(**config)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = share_of(_batch(**extra), booster.plugin.dp_rank, booster.plugin.dp_size)
    if ordinary:
        loss = model(**share).loss
        booster.backward(loss, optimizer)
    else:
        loss = booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss
    return loss.item(), optimizer.full_gradients()


def _train_as_said(options: dict[str, Any]) -> list[Report]:
    return [_train(options, *said, ordinary) for said in _SAID for ordinary in (False, True)]


def _of_all_stages(reports: tuple[Report, ...]) -> Report:
    gradients = {name: gradient for _, each in reports for name, gradient in each.items()}
    return reports[0][0], gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"tp_size": 2}),
        (2, {"tp_size": 2, "enable_sequence_parallelism": True}),
        (2, {}),
        (2, {"ep_size": 2}),
        (4, {"tp_size": 2}),
        (1, {"num_microbatches": 3}),
        (2, {"pp_size": 2, "num_microbatches": 3, "pp_style": "zbv", "gradient_checkpointing": "full"}),
        (4, {"pp_size": 2, "dp_size": 2}),
        (4, {"pp_size": 2, "ep_size": 2}),
        (4, {"pp_size": 2, "tp_size": 2, "enable_sequence_parallelism": True}),
        (2, {"cp_size": 2}),
        (4, {"cp_size": 2, "ep_size": 4}),
        (4, {"cp_size": 2, "pp_size": 2, "num_microbatches": 3}),
        (2, _EXCHANGED),
        (4, {**_EXCHANGED, "pp_size": 2}),
    ],
)
def test_it_is_that_of_plain_training(ranks: int, options: dict[str, Any]) -> None:
    reports = map(_of_all_stages, zip(*run_on_ranks(ranks, _train_as_said, options), strict=True))
    for config, extra in _SAID:
        plain = _model(**config)
        result = plain(**_batch(**extra))
        result.loss.backward()
        for loss, gradients in (next(reports), next(reports)):
            assert abs(loss - result.loss.item()) < 1e-5, (config, extra)
            for name, parameter in plain.named_parameters():
                scale = parameter.grad.abs().max()
                assert torch.allclose(gradients[name], parameter.grad, atol=1e-5 * scale, rtol=1e-4), name


def _own_loss(outputs: Any, labels: Tensor) -> Tensor:
    """A loss of the user's own: the mean over sequences of a sum, and the auxiliary loss with another weight."""
    logs = outputs.logits.float().log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0))
    return -logs.squeeze(-1).masked_fill(labels[:, 1:] < 0, 0.0).sum(-1).mean() + 3.0 * outputs.aux_loss


def _three_samples() -> dict[str, Any]:
    rows = {name: value[:3] for name, value in _batch().items()}
    return {**rows, "output_router_logits": True}


def _train_on_own_loss(options: dict[str, Any]) -> tuple[float, float, Report]:
    """Train without labels, after an evaluation; the auxiliary loss of both, the loss and gradients."""
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = _model()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = share_of(_three_samples(), booster.plugin.dp_rank, booster.plugin.dp_size)
    labels = share.pop("labels")
    weight = len(labels) * booster.plugin.dp_size / 3  # of two replicas, one has two samples and one has one
    with torch.no_grad():
        evaluated = model(**share).aux_loss.item()
    outputs = model(**share)
    assert "loss" not in outputs
    loss = _own_loss(outputs, labels)
    booster.backward(loss, optimizer)  # which weights a mean by its rows
    return evaluated, outputs.aux_loss.item(), (weight * loss.item(), optimizer.full_gradients())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pp_size": 2}),
        (2, {"pp_size": 2, "num_microbatches": 3, "pp_style": "zbv", "gradient_checkpointing": "full"}),
        (4, {"pp_size": 2, "dp_size": 2, "num_microbatches": 2}),
        (4, {"pp_size": 2, "cp_size": 2, "num_microbatches": 2}),
        (2, {"cp_size": 2}),
        (2, _EXCHANGED),
    ],
)
def test_a_loss_of_ones_own_adds_that_of_all_stages(ranks: int, options: dict[str, Any]) -> None:
    plain, batch = _model(), _three_samples()
    labels = batch.pop("labels")
    result = plain(**batch)
    loss = _own_loss(result, labels)
    loss.backward()
    *values, reports = zip(*run_on_ranks(ranks, _train_on_own_loss, options), strict=True)
    assert all(abs(value - result.aux_loss.item()) < 1e-5 for value in (*values[0], *values[1]))
    assert abs(sum(found for found, _ in reports) / ranks - loss.item()) < 1e-4
    _, gradients = _of_all_stages(reports)
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-5 * scale, rtol=1e-4), name


def test_the_configuration_that_the_forward_pass_reads_counts() -> None:
    """A model of texts and images reads that of its text, or (5.17) the argument alone; never the whole model's."""
    sizes = {**_SIZES, "num_hidden_layers": 1, "vocab_size": 67, "moe_intermediate_size": 8, "head_dim": 8}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = Qwen3VLMoeConfig(text_config={**sizes, "num_experts": 4}, vision_config=vision)
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(config)
    config.output_router_logits = True
    assert not routers_are_asked(model, {}) and routers_are_asked(model, {"output_router_logits": True})
    config.text_config.output_router_logits = True
    reads_text = "self.config.text_config.output_router_logits" in inspect.getsource(type(model).forward)
    assert routers_are_asked(model, {}) == reads_text
