"""What scripts pass to `generate()` gives the tokens of the unsharded model: sharded, in stages, and both.

What breaks here first: a rank that goes on while another has ended. Look in
`plugins/hybrid_parallel/boosted/stage_generation.py` and `shardformer/generation.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LogitsProcessor, StoppingCriteria

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.utils.module_paths import CACHE_NAMES
from zoo_tests.harness.case import LAYOUTS
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.zoo import FAMILIES

_RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class _Shifted(LogitsProcessor):
    """Depends on the tokens so far, and forbids the last one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores + torch.linspace(0, 2, scores.shape[-1]) * (input_ids.sum(1, keepdim=True) % 3)
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


class _EndsAtEvenTokens(StoppingCriteria):
    """Another answer for each text, and at each step."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] % 2 == 0) & (input_ids[:, -2] % 2 == 0)


class _Clock(StoppingCriteria):
    """One rank alone finds that the time is over."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), dist.get_rank() == 0)


def _prompt(family: str) -> dict[str, Tensor]:
    """Ragged prompts, padded on the left for a decoder."""
    batch = FAMILIES[family].batch(FAMILIES[family].main_head, 0, 3)
    prompt = {key: batch[key] for key in ("input_ids", "attention_mask")}
    assert len(set(prompt["attention_mask"].sum(1).tolist())) > 1
    return prompt


def _ends(native: nn.Module, prompt: dict[str, Tensor]) -> list[int]:
    """Tokens that end the texts at different steps; a text that repeats one token would end at its first."""
    texts = native.generate(**prompt, max_new_tokens=7, min_new_tokens=7, do_sample=False, pad_token_id=0)[:, -7:]
    repeats = all(len(set(text.tolist())) == 1 for text in texts)
    return [texts[1, 4].item()] if repeats else [texts[0, 1].item(), texts[1, 4].item()]


def _ways(ends: list[int]) -> dict[str, Callable[[], dict[str, Any]]]:
    greedy = {"do_sample": False, "eos_token_id": ends}
    sampled = {"do_sample": True, "temperature": 1.3, "top_p": 0.9}
    return {
        "texts end apart": lambda: greedy | _RETURNED,
        "beams end apart": lambda: greedy | _RETURNED | {"num_beams": 3, "early_stopping": True},
        "samples end apart": lambda: sampled | {"eos_token_id": ends} | _RETURNED,
        "several samples": lambda: sampled | {"num_return_sequences": 2},
        "a processor": lambda: greedy | {"logits_processor": [_Shifted()]},
        "a processor of samples": lambda: sampled | {"logits_processor": [_Shifted()]},
        "a processor of beams": lambda: {"do_sample": False, "logits_processor": [_Shifted()], "num_beams": 2},
        "a criterion": lambda: {"do_sample": False, "stopping_criteria": [_EndsAtEvenTokens()]},
        "one token": lambda: {"do_sample": False, "max_new_tokens": 1} | _RETURNED,
    }


def _model(family: str) -> nn.Module:
    # transformers makes T5's cache as deep as its encoder.
    config = {"num_layers": 4} if family == "t5" else {}
    return FAMILIES[family].build(FAMILIES[family].main_head, torch.float32, **config).eval()


def _boosted(native: nn.Module, layout: str) -> Any:
    sizes = LAYOUTS[layout]
    plugin = HybridParallelPlugin(tp_size=sizes.tp_size, pp_size=sizes.pp_size)
    return Booster(plugin=plugin).boost(copy.deepcopy(native)).eval()


def _check_ways(family: str, layout: str) -> None:
    native = _model(family)
    boosted, prompt = _boosted(native, layout), _prompt(family)
    lengths = set()
    ways = _ways(_ends(native, prompt))
    if native.config.is_encoder_decoder:  # its forward has no logits_to_keep: the head scores the whole prompt
        ids = prompt["input_ids"][:, -3:]
        ways["a prompt of the decoder"] = lambda: {"do_sample": False, "decoder_input_ids": ids} | _RETURNED
    for name, make in ways.items():
        results = []
        for model in (boosted, native):
            torch.manual_seed(3)
            result = model.generate(**{**prompt, "max_new_tokens": 7, "pad_token_id": 0, **make()})
            results.append(result if isinstance(result, Tensor) else dict(result) | dict.fromkeys(CACHE_NAMES))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if name == "texts end apart":
            lengths = set((results[0]["sequences"] != 0).sum(1).tolist())
    assert len(lengths) > 1, "choose other ends"


@pytest.mark.parametrize("layout", ["tp2", "pp2", pytest.param("tp2pp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_what_scripts_pass_to_generate(family: str, layout: str) -> None:
    run_on_ranks(LAYOUTS[layout].world_size, _check_ways, family, layout)


@distributed(2)
def test_sharded_ranks_end_when_the_first_one_does() -> None:
    native, prompt = _model("llama"), _prompt("llama")
    boosted = _boosted(native, "tp2")
    found = boosted.generate(**prompt, max_new_tokens=9, pad_token_id=0, stopping_criteria=[_Clock()], max_time=600.0)
    assert torch.equal(found, native.generate(**prompt, max_new_tokens=1, pad_token_id=0))


def _bytes(layers: list[Any]) -> int:
    return sum(each.nbytes for layer in layers for each in (layer.keys, layer.values))


def _check_cache(layout: str) -> None:
    native = _model("llama")
    boosted = _boosted(native, layout)
    options = _prompt("llama") | {"max_new_tokens": 5, "return_dict_in_generate": True, "pad_token_id": 0}
    found, whole = (model.generate(**options).past_key_values for model in (boosted, native))
    tokens = whole.layers[0].keys.shape[0] * whole.layers[0].keys.shape[2]
    assert len(found.layers) == len(whole.layers) == native.config.num_hidden_layers
    own = {int(name.split(".")[2]) for name, _ in boosted.named_parameters() if name.startswith("model.layers.")}
    sizes = LAYOUTS[layout]
    of_all_stages = torch.tensor(len(own))
    dist.all_reduce(of_all_stages, group=boosted.mesh.group("pp"))
    assert own and of_all_stages == len(whole.layers)
    mine = [found.layers[index] for index in sorted(own)]
    assert _bytes(mine) == _bytes([whole.layers[index] for index in own]) // sizes.tp_size
    # Layers of other stages count the tokens, by one byte each.
    others = [layer for index, layer in enumerate(found.layers) if index not in own]
    assert _bytes(others) == 2 * tokens * len(others)
    for index in own:
        heads = native.config.num_key_value_heads // sizes.tp_size
        first = heads * boosted.mesh.rank("tp")
        expected = whole.layers[index].keys[:, first : first + heads]
        torch.testing.assert_close(found.layers[index].keys, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2pp2", marks=pytest.mark.slow)])
def test_a_stage_caches_its_own_layers_alone(layout: str) -> None:
    run_on_ranks(LAYOUTS[layout].world_size, _check_cache, layout)


@distributed(2)
def test_whisper_writes_the_plain_text_sharded() -> None:
    family = FAMILIES["whisper"]
    native = family.build(family.main_head, torch.float32).eval()
    boosted = _boosted(native, "tp2")
    sound = family.batch(family.main_head, 0, 3)["input_features"].float()
    tokens = [model.generate(input_features=sound, max_new_tokens=5, do_sample=False) for model in (boosted, native)]
    assert torch.equal(*tokens)


@distributed(2)
def test_caches_that_a_pipeline_cannot_fill_are_refused_on_all_ranks() -> None:
    boosted, prompt = _boosted(_model("llama"), "pp2"), _prompt("llama")
    for name in ("static", "quantized", "offloaded"):
        with pytest.raises(ConfigurationError, match=f"cannot do cache_implementation='{name}'; leave it out"):
            boosted.generate(**prompt, max_new_tokens=2, cache_implementation=name)
    for option in ({"prompt_lookup_num_tokens": 2}, {"guidance_scale": 2.0}, {"output_hidden_states": True}):
        with pytest.raises(ConfigurationError, match=f"cannot do {next(iter(option))}="):
            boosted.generate(**prompt, max_new_tokens=2, **option)
    assert dist.get_world_size() == 2 and boosted.generate(**prompt, max_new_tokens=2).shape[0] == 3
