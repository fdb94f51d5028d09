"""The load-balancing loss of routers is part of the loss where it is asked for, and never dropped in silence.

Look in `shardformer/losses/text.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.ranks import RankError, run_on_ranks

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def _model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = MixtralConfig(**_SIZES, **experts, num_hidden_layers=2, vocab_size=67, router_aux_loss_coef=2.0)
    return MixtralForCausalLM(config)


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 67, (4, 13), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _train(options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = _model()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = booster.plugin.dp_rank, booster.plugin.dp_size
    share = {key: value.chunk(rows[1])[rows[0]] for key, value in _batch().items()}
    loss = booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss.item()
    return loss, optimizer.full_gradients()


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {"tp_size": 2})])
def test_it_is_that_of_plain_training(ranks: int, options: dict[str, Any]) -> None:
    plain = _model()
    result = plain(**_batch())
    result.loss.backward()
    loss, gradients = run_on_ranks(ranks, _train, options)[0]
    assert result.aux_loss > 0.1 and abs(loss - result.loss.item()) < 1e-5
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        assert torch.allclose(gradients[name], parameter.grad, atol=1e-5 * scale, rtol=1e-4), name


@pytest.mark.parametrize(("ranks", "options"), [(1, {"num_microbatches": 4}), (2, {"ep_size": 2})])
def test_parts_of_a_batch_have_one_each(ranks: int, options: dict[str, Any]) -> None:
    """Their mean, weighted by labels; of samples alone, and of the halves that replicas read."""
    plain, batch = _model(), _batch()
    parts = options.get("num_microbatches", ranks)
    results = [plain(**{key: value.chunk(parts)[part] for key, value in batch.items()}) for part in range(parts)]
    counts = [(each[:, 1:] != -100).sum().item() for each in batch["labels"].chunk(parts)]
    expected = sum(result.loss.item() * count for result, count in zip(results, counts, strict=True)) / sum(counts)
    assert abs(run_on_ranks(ranks, _train, options)[0][0] - expected) < 1e-5


@pytest.mark.parametrize("options", [{"pp_size": 2}, {"cp_size": 2}])
def test_scores_that_are_spread_over_ranks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="output_router_logits=True adds a loss over the router scores of all layers"):
        run_on_ranks(2, _train, options)
