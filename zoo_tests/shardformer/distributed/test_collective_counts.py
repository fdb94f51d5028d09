"""How many collectives a tensor-parallel layer takes.

What breaks here first: projections that share an input but not the reduction of its gradient. Look in
`shardformer/layers/linear.py` (`SharedInput`).
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardformer import ShardConfig, ShardFormer
from zoo_tests.harness.ranks import run_on_ranks

_LAYERS = 3


def _reductions(num_layers: int) -> tuple[int, int]:
    """All-reduces of a forward and of a backward pass."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20}
    whole = LlamaModel(LlamaConfig(num_hidden_layers=num_layers, vocab_size=37, **sizes))
    model, _ = ShardFormer(ShardConfig()).optimize(whole)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        output = model(input_ids=torch.arange(10).view(2, 5), use_cache=False).last_hidden_state
        forward = reduce.call_count
        output.square().sum().backward()
        return forward, reduce.call_count - forward


@pytest.mark.parametrize("num_layers", [1, _LAYERS])
def test_a_layer_takes_two_all_reduces_each_way(num_layers: int) -> None:
    for forward, backward in run_on_ranks(2, _reductions, num_layers):
        assert forward == 2 * num_layers + 1, "one for the embedding"
        assert backward == 2 * num_layers, "one for query, key and value; one for gate and up"
