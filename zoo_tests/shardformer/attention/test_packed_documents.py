"""Documents packed into a row see each other exactly where those of the plain model do, in both loops.

transformers keeps them apart without a cache only. Look in `shardformer/attention/packed_documents.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks

_POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=67)).double()


def _batch(extra: dict[str, Any]) -> dict[str, Any]:
    ids = torch.randint(1, 67, _POSITIONS.shape, generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "position_ids": _POSITIONS, **extra}


def _losses(options: dict[str, Any], extra: dict[str, Any]) -> list[float]:
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2, **options))
    model = _model()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [booster.execute_pipeline(iter([_batch(extra)]), model, optimizer=optimizer).loss.item()]
    if booster.plugin.pp_size == 1:
        losses.append(model(**_batch(extra)).loss.item())
    return losses


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}], ids=str)
def test_they_are_those_of_the_plain_model(options: dict[str, Any]) -> None:
    expected = {}
    for use_cache in (None, False):
        extra = {} if use_cache is None else {"use_cache": use_cache}
        expected[use_cache] = _model()(**_batch(extra)).loss.item()
        for losses in run_on_ranks(2, _losses, options, extra):
            assert losses == pytest.approx([expected[use_cache]] * len(losses), rel=1e-6), f"use_cache={use_cache}"
    assert abs(expected[None] - expected[False]) > 1e-4, "the documents are not told apart"
