"""Models that are not sharded, and those that cannot be.

What breaks here first: a buffer in fp32 that a layer in 16 bit reads. Look in `plugins/hybrid_parallel/setup/model.py`
(`shard_model`).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin, guards
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES


@distributed(1)
def test_a_whole_model_in_16_bit_reads_its_buffers_in_the_dtype_of_its_weights() -> None:
    """Swinv2 computes position biases from coordinates in a buffer, and buffers keep their precision."""
    family = FAMILIES["swinv2"]
    batch = family.batch(family.main_head, 0, 4, torch.float32)
    plain = family.build(family.main_head, torch.float32)
    expected = plain(**batch).loss
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model, optimizer = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    found = booster.execute_pipeline(batch, model, optimizer=optimizer).loss
    torch.testing.assert_close(found, expected.detach(), rtol=2e-2, atol=2e-2)


class _ReadsHead(LlamaForCausalLM):
    """Has a loss of its own, in a method that its forward calls."""

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.lm_head.weight.dtype) @ self.lm_head.weight.T

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        return self._logits(self.model(input_ids).last_hidden_state)


class _CallsHead(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        return self.lm_head(self.model(input_ids).last_hidden_state.to(self.lm_head.weight.dtype))


def _replacement(self: LlamaForCausalLM, input_ids: Tensor, **given: Any) -> Tensor:
    return torch.nn.functional.linear(self.model(input_ids)[0], self.get_output_embeddings().weight)


@distributed(2)
def test_a_forward_that_reads_the_weight_of_the_head_is_refused_where_it_is_cut() -> None:
    config = FAMILIES["llama"].build("causal_lm", torch.float32).config
    replaced = LlamaForCausalLM(config)
    replaced.forward = MethodType(_replacement, replaced)  # as kernel libraries do
    for model in (_ReadsHead(config), replaced):
        with pytest.raises(ConfigurationError, match=r"reads lm_head.weight, .* tp_size=2 .*; call self.lm_head\("):
            Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(model)
    Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(_CallsHead(config))


def test_boost_looks_at_the_parameters_of_a_whole_model_once(
    two_fake_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look for each module took most of the boost of a model with many layers."""
    family, seen = FAMILIES["gpt2"], []
    model = family.build(family.main_head, torch.float32)
    spec_of = guards.spec_of
    monkeypatch.setattr(guards, "spec_of", lambda param: seen.append(param) or spec_of(param))
    Booster(plugin=HybridParallelPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert 0 < len(seen) <= 2 * len(list(model.parameters()))
