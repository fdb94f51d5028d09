"""Generation under tensor parallelism finds the tokens of the unsharded model: greedy, beams, sampling with one seed.

What breaks here first: a cache that counts all heads, logits that only one rank has whole, ranks that sample apart.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import ShardConfig, ShardFormer
from zoo_tests.ranks import distributed
from zoo_tests.zoo import FAMILIES

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
}
_DECODERS = ("llama", "gpt2", "opt", "bloom", "chatglm2", "qwen3", "gptj")


def _tokens(model: Any, family: str, way: str) -> Tensor:
    torch.manual_seed(3)
    prompt = FAMILIES[family].batch(FAMILIES[family].main_head, 0, 3)
    kept = {key: prompt[key] for key in ("input_ids", "attention_mask")}
    return model.generate(**kept, max_new_tokens=6, min_new_tokens=6, pad_token_id=0, **_WAYS[way])


def _model(family: str) -> nn.Module:
    # transformers makes T5's cache as deep as its encoder.
    config = {"num_layers": 4} if family == "t5" else {}
    return FAMILIES[family].build(FAMILIES[family].main_head, torch.float32, **config).eval()


@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize("family", [*_DECODERS, "t5"])
@distributed(2)
def test_two_ranks_find_the_tokens_of_one(family: str, way: str) -> None:
    native = _model(family)
    sharded, _ = ShardFormer(ShardConfig(inference_only=True)).optimize(copy.deepcopy(native))
    assert torch.equal(_tokens(sharded, family, way), _tokens(native, family, way))


@pytest.mark.parametrize("family", ["llama", "chatglm2"])
@distributed(4)
def test_copied_key_value_heads_have_a_cache_of_their_own(family: str) -> None:
    native = _model(family)
    boosted = Booster(plugin=HybridParallelPlugin(tp_size=4)).boost(copy.deepcopy(native))
    assert torch.equal(_tokens(boosted.eval(), family, "greedy"), _tokens(native, family, "greedy"))


@distributed(2)
def test_a_pipeline_says_what_to_do() -> None:
    boosted = Booster(plugin=HybridParallelPlugin(pp_size=2)).boost(_model("llama"))
    with pytest.raises(
        RuntimeError, match=r"generate\(\) cannot run stage . of a pipeline; boost the model with pp_size=1"
    ):
        boosted.generate(input_ids=torch.ones(1, 3, dtype=torch.long))
