"""Generation under tensor parallelism finds the tokens of the unsharded model: greedy, beams, sampling with one seed.

What breaks here first: a cache that counts all heads, logits that only one rank has whole, ranks that sample apart.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import ShardConfig, ShardFormer
from shardformer.utils.module_paths import CACHE_NAMES
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.train_sharded import boost
from zoo_tests.zoo import FAMILIES

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
}
_DECODERS = ("llama", "gpt2", "opt", "bloom", "chatglm2", "qwen3", "gptj")


def _prompt(family: str) -> dict[str, Tensor]:
    prompt = FAMILIES[family].batch(FAMILIES[family].main_head, 0, 3)
    return {key: prompt[key] for key in ("input_ids", "attention_mask")}


def _sampled(model: Any, family: str) -> Tensor:
    """Six tokens by the random numbers as they are."""
    return model.generate(**_prompt(family), do_sample=True, min_new_tokens=6, max_new_tokens=6, pad_token_id=0)


def _tokens(model: Any, family: str, way: str) -> Tensor:
    torch.manual_seed(3)
    return model.generate(**_prompt(family), max_new_tokens=6, min_new_tokens=6, pad_token_id=0, **_WAYS[way])


def _model(family: str) -> nn.Module:
    # transformers makes T5's cache as deep as its encoder.
    config = {"num_layers": 4} if family == "t5" else {}
    return FAMILIES[family].build(FAMILIES[family].main_head, torch.float32, **config).eval()


@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in (*_DECODERS[1:], "t5"))]
)
@distributed(2)
def test_two_ranks_find_the_tokens_of_one(family: str, way: str) -> None:
    native = _model(family)
    sharded, _ = ShardFormer(ShardConfig(inference_only=True)).optimize(copy.deepcopy(native))
    assert torch.equal(_tokens(sharded, family, way), _tokens(native, family, way))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "chatglm2"])
@distributed(4)
def test_copied_key_value_heads_have_a_cache_of_their_own(family: str) -> None:
    native = _model(family)
    boosted = Booster(plugin=HybridParallelPlugin(tp_size=4)).boost(copy.deepcopy(native))
    assert torch.equal(_tokens(boosted.eval(), family, "greedy"), _tokens(native, family, "greedy"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "chatglm2", "t5"])
@distributed(2)
def test_ranks_that_were_seeded_apart_draw_the_same_tokens(family: str) -> None:
    """Those of the first rank, whose random numbers all go on with: also a second time."""
    native = _model(family)
    sharded, _ = ShardFormer(ShardConfig(inference_only=True)).optimize(copy.deepcopy(native))
    torch.manual_seed(3)
    expected = [_sampled(native, family) for _ in range(2)]
    torch.manual_seed(3 + dist.get_rank())
    found = [_sampled(sharded, family) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("family", ["llama", "chatglm2"])
@distributed(2)
def test_texts_end_apart(family: str) -> None:
    """One text ends early and is padded, the others go on."""
    native, end = _model(family), 0
    for tokens in _tokens(native, family, "greedy")[:, -6:].tolist():
        end = next((token for token in tokens[1:4] if tokens.count(token) == 1), end)
    kept = _prompt(family)
    expected = native.generate(**kept, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=0)
    ends = (expected == end).any(1)
    assert ends.any() and not ends.all(), "choose another end"
    boosted = Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(copy.deepcopy(native)).eval()
    found = boosted.generate(**kept, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=0)
    assert torch.equal(found, expected)


_RETURNS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
_FURTHER: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 3},
    "lookup_sampling": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "static": {"cache_implementation": "static"},
    "returned": _RETURNS | {"output_attentions": True, "output_hidden_states": True, "num_beams": 2},
    "several": {"do_sample": True, "num_return_sequences": 3, "repetition_penalty": 1.3},
}


def _check_further_ways(native: nn.Module, boosted: Any, family: str) -> None:
    """One prompt, as decoding ahead asks for; the assistant is a model of its own, and a boosted one."""
    kept = {key: value[-1:] for key, value in _prompt(family).items()}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ways = _FURTHER | {"assisted": {"assistant_model": copy.deepcopy(native)}}
    ways["assisted_sampling"] = ways["assisted"] | {"do_sample": True}
    ways["assisted_by_boosted"] = {"assistant_model": boosted}
    for name, way in ways.items():
        results = []
        for model in (native, boosted):
            torch.manual_seed(3)
            own = {"assistant_model": native} if name == "assisted_by_boosted" and model is native else {}
            result = model.generate(**kept, **{**options, **way, **own})
            result = result if isinstance(result, Tensor) else dict(result) | dict.fromkeys(CACHE_NAMES)
            results.append(result)
        expected, found = results
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@distributed(4)
def test_further_ways_to_generate_with_heads_that_ranks_share_unevenly() -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    for attention in ("eager", "sdpa"):
        native = FAMILIES["llama"].build("causal_lm", torch.float32, attn_implementation=attention, **heads).eval()
        boosted = Booster(plugin=HybridParallelPlugin(tp_size=4)).boost(copy.deepcopy(native)).eval()
        if attention == "eager":
            _check_further_ways(native, boosted, "llama")
        else:
            for way in _WAYS:
                assert torch.equal(_tokens(boosted, "llama", way), _tokens(native, "llama", way))


@pytest.mark.slow
@distributed(2)
def test_an_encoder_decoder_returns_the_scores_of_all_heads() -> None:
    native = FAMILIES["t5"].build("generation", torch.float32, num_layers=4, attn_implementation="eager").eval()
    boosted = Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(copy.deepcopy(native)).eval()
    _check_further_ways(native, boosted, "t5")


@distributed(2)
def test_hidden_states_of_cut_sequences_are_refused() -> None:
    plugin = HybridParallelPlugin(tp_size=2, enable_sequence_parallelism=True)
    boosted = Booster(plugin=plugin).boost(_model("llama")).eval()
    with pytest.raises(RuntimeError, match=r"output_hidden_states=True\) finds parts of sequences under enable_seq"):
        boosted.generate(**_prompt("llama"), max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True)


@pytest.mark.slow
@distributed(4)
def test_replicas_write_texts_of_their_own() -> None:
    """Of different lengths, as long as the longest of none but their own; after a step of training."""
    case = Case(recipe=Recipe(family="llama", head="causal_lm", precision="fp32"), layout="tp2dp2")
    boosted = boost(case.but(options=(("overlap_allgather", True),)))
    plain, batch = case.recipe.model(), case.recipe.batch(0)
    optimizer, _ = case.recipe.training(plain)
    loss_of(plain, case.recipe.zoo_head, batch).backward()
    optimizer.step()
    boosted.pipeline_backward(boosted.share(batch))
    boosted.optimizer.step()
    length = 4 + 3 * boosted.plugin.dp_rank
    kept = {key: value[:, -length:] for key, value in boosted.share(batch).items() if key != "labels"}
    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(boosted.model.eval().generate(**kept, **options), plain.eval().generate(**kept, **options))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "chatglm2"])
@distributed(2)
def test_cut_sequences(family: str) -> None:
    """A cache behind gathered sequences is whole; one behind exchanged heads would not be."""
    native = _model(family)
    for mode in ("split_gather", "all_to_all"):
        config = ShardConfig(inference_only=True, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
        sharded, _ = ShardFormer(config).optimize(copy.deepcopy(native))
        options = {"use_cache": mode == "split_gather", "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(
            sharded.generate(**_prompt(family), **options), native.generate(**_prompt(family), **options)
        )
    with pytest.raises(
        RuntimeError, match=r"leaves no key/value cache .* 'split_gather', or generate\(use_cache=False"
    ):
        sharded.generate(**_prompt(family))


@distributed(2)
def test_inference_only_leaves_nothing_to_train() -> None:
    model = _model("gpt2").train()
    sharded, _ = ShardFormer(ShardConfig(inference_only=True, enable_all_optimization=True)).optimize(model)
    assert not any(module.training for module in sharded.modules())
    assert not any(parameter.requires_grad for parameter in sharded.parameters())
    # Single tokens are not cut.
    assert ShardConfig(enable_all_optimization=True).enable_sequence_parallelism
    assert not ShardConfig(inference_only=True, enable_all_optimization=True).enable_sequence_parallelism


@distributed(2)
def test_the_model_inside_generates_on_all_stages() -> None:
    plain = _model("llama").eval()
    boosted = Booster(plugin=HybridParallelPlugin(pp_size=2)).boost(_model("llama")).eval()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    for model in (boosted, copy.deepcopy(boosted)):
        found = model.unwrap().generate(**_prompt("llama"), **options)
        assert torch.equal(found, plain.generate(**_prompt("llama"), **options))
