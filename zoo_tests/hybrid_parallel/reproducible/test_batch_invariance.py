"""Under `reproducible=True`, log-probabilities of training are the bits of those that `generate` drew from."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.reproducible import batch_invariance
from plugins.hybrid_parallel.reproducible.batch_invariance import _SAME, _attention, _linear
from zoo_tests.harness.ranks import run_on_ranks

PROMPT, ANSWER, TEMPERATURE = 7, 10, 0.7
PADDING = (0, 2, 6, 1)
_SIZES = {
    **{"vocab_size": 71, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "n_embd": 48, "n_head": 4},
    **{"n_layer": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


def _boosted(family: str, dtype: torch.dtype, options: dict[str, Any], **more: Any) -> tuple[Booster, Any, Any]:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **_SIZES, **{"sliding_window": 6} if family == "mistral" else {})
    model = AutoModelForCausalLM.from_config(config, **{"attn_implementation": "sdpa"} | more).to(dtype)
    precision = "bf16" if dtype is torch.bfloat16 else "fp32"
    booster = Booster(plugin=HybridParallelPlugin(**{"reproducible": True, "precision": precision} | options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def sampled(family: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    """Draw answers to prompts of several lengths, one token at a time; return them with their log-probabilities."""
    _, model, _ = _boosted(family, dtype, options)
    torch.manual_seed(5)
    prompts = torch.randint(2, 71, (len(PADDING), PROMPT))
    mask = (torch.arange(PROMPT) >= torch.tensor(PADDING)[:, None]).long()
    settings = {"do_sample": True, "temperature": TEMPERATURE, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER}
    found = model.eval().generate(
        input_ids=prompts * mask, attention_mask=mask, **settings, output_logits=True, return_dict_in_generate=True
    )
    logits, answers = torch.stack(found.logits, 1).float() / TEMPERATURE, found.sequences[:, PROMPT:]
    log_probs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    mask = torch.cat([mask, torch.ones_like(answers)], 1)
    return {"input_ids": found.sequences, "attention_mask": mask, "log_probs": log_probs}


def trained(family: str, dtype: torch.dtype, options: dict[str, Any], samples: dict[str, Tensor]) -> list[Tensor]:
    """Score the same answers in other batches: padded in front, packed into a row, and a step later."""
    booster, model, optimizer = _boosted(family, dtype, options)
    rows = torch.tensor([2, 0, 3])
    padded = {name: each[rows] for name, each in samples.items() if name != "log_probs"}
    mask = samples["attention_mask"].bool()
    packed = {"input_ids": samples["input_ids"][mask][None]}
    packed["position_ids"] = torch.cat([torch.arange(int(each.sum())) for each in mask])[None]
    new = model.token_log_probs(padded, TEMPERATURE).log_probs[:, PROMPT - 1 :]
    in_row = model.token_log_probs(packed, TEMPERATURE).log_probs.detach()[0]
    ends = mask.sum(1).cumsum(0) - 1
    ratio = (new - samples["log_probs"][rows]).exp()
    booster.backward((-ratio * torch.randn(ratio.shape)).mean(), optimizer)
    optimizer.step()
    later = model.token_log_probs(padded, TEMPERATURE).log_probs[:, PROMPT - 1 :]
    of_packed = torch.stack([in_row[end - ANSWER : end] for end in ends.tolist()])
    return [new.detach(), of_packed, later.detach(), ratio.detach()]


@cache
def _samples(family: str, dtype: torch.dtype, layout: str) -> dict[str, Tensor]:
    return run_on_ranks(_RANKS[layout], sampled, family, dtype, _LAYOUTS[layout])[0]


_LAYOUTS = {"one": {}, "tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}, "tp2pp2": {"tp_size": 2, "pp_size": 2}}
_RANKS = {"one": 1, "tp2": 2, "pp2": 2, "tp2pp2": 4}
_FP32, _BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("family", "dtype", "sampler", "trainer"),
    [
        ("llama", _BF16, "one", "one"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("llama", _FP32, "one", "tp2pp2"),
                ("llama", _BF16, "pp2", "tp2"),
                ("qwen3", _FP32, "tp2", "pp2"),
                ("qwen3", _BF16, "one", "tp2pp2"),
                ("mixtral", _FP32, "one", "tp2"),
                ("qwen3_moe", _BF16, "tp2", "one"),
                ("qwen3_moe", _FP32, "one", "pp2"),
                ("gpt2", _FP32, "one", "tp2"),
                ("gpt2", _BF16, "one", "one"),
                ("mistral", _FP32, "one", "one"),  # sliding windows
                ("phi3", _FP32, "one", "one"),  # not in blocks: heads that share keys are queries of one mask
                ("olmoe", _FP32, "one", "one"),  # experts in one product
                ("llama4_text", _FP32, "one", "one"),  # experts whose outputs are viewed
            ]
        ),
    ],
    ids=str,
)
def test_the_ratio_of_a_first_update_is_one(family: str, dtype: torch.dtype, sampler: str, trainer: str) -> None:
    samples = _samples(family, dtype, sampler)
    for new, packed, later, ratio in run_on_ranks(_RANKS[trainer], trained, family, dtype, _LAYOUTS[trainer], samples):
        assert torch.equal(new, samples["log_probs"][[2, 0, 3]]) and torch.equal(packed, samples["log_probs"])
        assert (ratio == 1).all() and not torch.equal(later, new)


@pytest.mark.parametrize("dtype", [_FP32, _BF16], ids=str)
def test_one_call_has_the_bits_of_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of other lengths, packed or padded in front; each operation runs once, or else once for each tile."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 4, 70, 24, generator=draw).to(dtype) for _ in range(3))
    place = torch.arange(70)
    document = torch.stack([place // 70, place // 41, (place < 30).long()])  # [rows, keys]
    mask = (document[:, None, :, None] == document[:, None, None]) & (place[:, None] >= place)
    weight, calls = torch.randn(33, 24, generator=draw).to(dtype), []

    def found() -> list[Tensor]:
        return [_attention(F.scaled_dot_product_attention, query, key, value, mask), _linear(F.linear, key, weight)]

    def tiled(name: str, whole: Any, by_tiles: Any, x: Tensor, other: Tensor) -> Tensor:
        calls.append(name)
        return by_tiles(x, other)

    whole = found()
    monkeypatch.setattr(batch_invariance, "_in_one_call", tiled)
    assert all(map(torch.equal, whole, found()))
    # Groups of 70 (3 tiles), of 41 and 40 (2), of 29 and 30 (1): those of as many tiles are one product.
    assert calls == [*["scores", "values"] * 3, "linear"]
    monkeypatch.undo()
    assert all(_SAME[key] for key in _SAME if key[0] in ("scores", "values")), "kernels of this CPU add up alike"


def refused() -> None:
    """Attention that chooses its own order of sums, and models of states, are refused where tokens are scored."""
    batch = {"input_ids": torch.arange(2, 10)[None]}
    _, model, _ = _boosted("llama", _FP32, {}, attn_implementation="eager")
    with pytest.raises(ConfigurationError, match="attn_implementation='eager' adds up keys in an order of"):
        model.token_log_probs(batch)
    assert model.generate(**batch, max_new_tokens=2).shape == (1, 10)


def test_other_attention_is_refused() -> None:
    run_on_ranks(1, refused)
