"""The share of parameters and FLOPs that tensor parallelism divides, of a model whose shares are known by hand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from plugins.hybrid_parallel.verify.propose import share_cut

_CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)
_NORMS = (2 * 2 + 1) * 32


def test_all_but_the_norms_of_llama_is_cut():
    def build() -> LlamaForCausalLM:
        return LlamaForCausalLM(_CONFIG)

    found = share_cut(build, {"input_ids": torch.arange(10)[None]}, make_vocab_size_divisible_by=1)
    total = sum(param.numel() for param in build().parameters())
    assert found.parameters == pytest.approx(1 - _NORMS / total)
    assert found.flops == pytest.approx(1, abs=0.02)  # the rotary table is a matrix product of every rank


def test_layers_that_are_gathered_count_as_cut_and_attention_does_not():
    def build() -> LlamaForCausalLM:
        return LlamaForCausalLM(_CONFIG)

    found = share_cut(build, {"input_ids": torch.arange(64)[None]}, sharding_dim=-1)
    total = sum(param.numel() for param in build().parameters())
    assert found.parameters == pytest.approx(1 - (_NORMS + 128 * 32) / total)  # the embedding stays
    assert 0.5 < found.flops < 0.9
