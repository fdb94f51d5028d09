"""Generation through the stages of a pipeline finds the tokens of the unsharded model.

What breaks here first: a stage that reads the number of tokens so far from a layer of another stage. Look in
`plugins/hybrid_parallel/boosted/stage_generation.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache, StoppingCriteria

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.utils.module_paths import CACHE_NAMES
from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

_LENGTH = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
_RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
_WAYS: dict[str, dict[str, Any]] = {
    "greedy": _RETURNED | {"do_sample": False},
    "beams": _RETURNED | {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2, "repetition_penalty": 1.3},
}
_CHUNKS = {"pp_style": "interleaved", "num_model_chunks": 2}


def _model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    # transformers makes T5's cache as deep as its encoder.
    config = {"num_layers": 4} if family == "t5" else {}
    return FAMILIES[family].build(FAMILIES[family].main_head, dtype, **config).eval()


def _prompt(family: str) -> dict[str, Tensor]:
    """Three ragged prompts, padded on the left for a decoder."""
    prompt = FAMILIES[family].batch(FAMILIES[family].main_head, 0, 3)
    return {key: prompt[key] for key in ("input_ids", "attention_mask")}


def _boosted(native: nn.Module, **options: Any) -> Any:
    plugin = HybridParallelPlugin(**{"precision": "fp32", **options})
    return Booster(plugin=plugin).boost(copy.deepcopy(native)).eval()


def _check(boosted: Any, native: nn.Module, make: Callable[[], dict[str, Any]], name: str = "") -> None:
    """Compare what both return; the ranks are seeded apart, and draw as the first one."""
    results = []
    for model, seed in ((boosted, 3 + dist.get_rank()), (native, 3)):
        torch.manual_seed(seed)
        result = model.generate(**make())
        results.append(result if isinstance(result, Tensor) else dict(result) | dict.fromkeys(CACHE_NAMES))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def _check_ways(family: str, **options: Any) -> None:
    native = _model(family)
    boosted = _boosted(native, **options)
    for name, way in _WAYS.items():
        _check(boosted, native, lambda way=way: _prompt(family) | _LENGTH | way, name)


def _families(fast: tuple[str, ...], *slow: str) -> list:
    return [*fast, *(pytest.param(family, marks=pytest.mark.slow) for family in slow)]


_DECODERS = ("opt", "bloom", "qwen3", "gptj", "gemma2", "gemma3", "mixtral", "chatglm2")


@pytest.mark.parametrize("family", _families(("llama", "gpt2", "t5"), "bart", *_DECODERS))
@distributed(2)
def test_two_stages(family: str) -> None:
    _check_ways(family, pp_size=2)


@pytest.mark.parametrize("family", _families(("llama", "t5"), "gpt2", "bart", "gemma3"))
@distributed(2)
def test_several_stages_of_a_rank(family: str) -> None:
    _check_ways(family, pp_size=2, num_microbatches=2, **_CHUNKS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5", "gemma3"])
@distributed(2)
def test_stages_in_a_v(family: str) -> None:
    _check_ways(family, pp_size=2, pp_style="zbv")


@pytest.mark.parametrize("family", _families(("gpt2",), "llama", "t5", "bart", "mixtral", "chatglm2"))
@distributed(4)
def test_sharded_stages(family: str) -> None:
    _check_ways(family, pp_size=2, tp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5"])
@distributed(4)
def test_further_layouts(family: str) -> None:
    _check_ways(family, pp_size=4)
    _check_ways(family, pp_size=2, tp_size=2, enable_sequence_parallelism=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(4)
def test_replicas_write_texts_of_their_own(dtype: torch.dtype) -> None:
    native = _model("llama", dtype)
    boosted = _boosted(native, pp_size=2, dp_size=2)
    length = 4 + 3 * boosted.mesh.rank("dp")
    prompt = {key: value[-1:, -length:] for key, value in _prompt("llama").items()}
    _check(boosted, native, lambda: prompt | {"max_new_tokens": length, "pad_token_id": 0})


@distributed(2)
def test_adapters() -> None:
    native = with_adapters(_model("llama"), ("q_proj", "v_proj"), ()).eval()
    _check(_boosted(native, pp_size=2), native, lambda: _prompt("llama") | _LENGTH | _RETURNED)


class _EndsAt(StoppingCriteria):
    """One rank alone knows when to end, as with a clock."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 16 and dist.get_rank() == 0)


class _Streamed:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@pytest.mark.slow
@distributed(2)
def test_what_generate_is_given() -> None:
    native = _model("llama")
    boosted = _boosted(native, pp_size=2)
    kept = _prompt("llama") | _LENGTH
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "no cache": lambda: kept | {"use_cache": False},
        "prompts in parts": lambda: kept | {"prefill_chunk_size": 4},
        "a cache of the user": lambda: kept | {"past_key_values": DynamicCache()},
        "a time": lambda: kept | {"max_time": 100.0},
    }
    for name, make in ways.items():
        _check(boosted, native, make, name)

    tokens = boosted.generate(**_prompt("llama"), max_new_tokens=8, stopping_criteria=[_EndsAt()], pad_token_id=0)
    assert torch.equal(tokens, native.generate(**_prompt("llama"), max_new_tokens=3, pad_token_id=0))

    streamer = _Streamed() if dist.get_rank() == 0 else None
    one = {key: value[:1] for key, value in kept.items() if isinstance(value, Tensor)}
    tokens = boosted.generate(**one, **_LENGTH, streamer=streamer)
    assert streamer is None or streamer.tokens == [*tokens.flatten().tolist(), -1]

    # The next question of a conversation continues with the cache of the last answer.
    first = boosted.generate(**one, **_LENGTH, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, one["input_ids"][:, :3]], 1)
    _check_continued(boosted, native, longer, first.past_key_values)


def _check_continued(boosted: Any, native: nn.Module, tokens: Tensor, cache: Any) -> None:
    mask = torch.ones_like(tokens)
    mask[:, : tokens.shape[1] - 9] = _prompt("llama")["attention_mask"][:1]
    found = boosted.generate(input_ids=tokens, attention_mask=mask, past_key_values=cache, **_LENGTH)
    assert torch.equal(found, native.generate(input_ids=tokens, attention_mask=mask, **_LENGTH))


@distributed(2)
def test_what_a_pipeline_cannot_do_is_refused_on_all_ranks() -> None:
    native = _model("llama")
    boosted, rank = _boosted(native, pp_size=2), dist.get_rank()
    kept = _prompt("llama") | _LENGTH
    refused: dict[str, dict[str, Any]] = {
        "cannot do assistant_model=LlamaForCausalLM; leave it out": {"assistant_model": native},
        "cannot do cache_implementation='static'": {"cache_implementation": "static"},
        "cannot do output_attentions=True": {"output_attentions": True},
        "this cache has a StaticLayer": {"past_key_values": StaticCache(config=native.config, max_cache_len=30)},
        r"stage 0 calls .*max_new_tokens=4.* while stage 1 .*max_new_tokens=5": {"max_new_tokens": 4 + rank},
        r"stage 0 calls .*checksum .* while stage 1 calls": {"input_ids": kept["input_ids"] + rank},
    }
    for sentence, given in refused.items():
        with pytest.raises(ConfigurationError, match=sentence):
            boosted.generate(**kept | given)
    with pytest.raises(
        ConfigurationError, match=r"stage 0 calls model\.generate\(.*\) while stage 1 calls model\(\*\*"
    ):
        boosted.generate(**kept) if rank == 0 else boosted(**_prompt("llama"))
    assert torch.equal(boosted.generate(**kept), native.generate(**kept)), "a refusal leaves the model as it was"


@distributed(2)
def test_a_loop_of_its_own_is_refused() -> None:
    family = FAMILIES["whisper"]
    boosted = _boosted(family.build(family.main_head, torch.float32), pp_size=2)
    with pytest.raises(ConfigurationError, match=r"WhisperForConditionalGeneration\.generate is a loop of its own"):
        boosted.generate(input_features=torch.zeros(1, 8, 16))
