"""Attention backends: which one a model gets, what is refused, and that a slow kernel is never silent.

GPU routes are decided by pure functions, so that they are tested without one. What breaks here first: a release of
transformers that hands masks or biases to kernels in another way.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from shardformer import ShardConfig, ShardFormer
from shardformer.attention import backends
from shardformer.attention.backends import SDPA, Backend, choose_backend, slow_reason
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

BF16, FP32 = torch.bfloat16, torch.float32


def _choose(request: bool | str = True, installed: tuple[str, ...] = (), **changes: Any) -> Backend:
    needs: dict[str, Any] = {"supports_flash": True, "supports_sdpa": True, "soft_caps": False}
    needs |= {"device": "cuda", "dtype": BF16} | changes
    return choose_backend(request, installed=lambda name: name in (*installed, "sdpa"), **needs)


def test_the_fastest_that_fits_is_chosen() -> None:
    both = ("flash_attention_3", "flash_attention_2")
    assert _choose(installed=both).implementation == "flash_attention_3"
    assert _choose(installed=both[1:]).implementation == "flash_attention_2"
    assert _choose().implementation == SDPA
    assert _choose(installed=both, dtype=FP32).implementation == SDPA
    assert _choose(installed=both, device="cpu").implementation == SDPA
    assert _choose(installed=both, supports_flash=False).implementation == SDPA
    assert _choose(installed=both, soft_caps=True).implementation == "flash_attention_3"


def test_what_no_backend_can_do_keeps_its_own_attention_with_a_reason() -> None:
    assert _choose(soft_caps=True) == Backend(None, _choose(soft_caps=True).reason) and _choose(soft_caps=True).reason
    assert _choose(supports_sdpa=False, supports_flash=False).reason == "transformers has no SDPA path for it"


@pytest.mark.parametrize(
    ("request_", "changes", "message"),
    [
        ("flash", {}, "'flash' is not an attention backend; use True, False or one of flash_attention_3"),
        ("flash_attention_2", {}, "needs the package flash_attn, which is not installed; use True or 'sdpa'"),
        ("xformers", {}, "needs the package xformers, which is not installed"),
        (
            "flash_attention_2",
            {"installed": ("flash_attention_2",), "dtype": FP32},
            "runs on GPUs in 16 bit, not on cuda in torch.float32; use True or 'sdpa'",
        ),
        (
            "flash_attention_2",
            {"installed": ("flash_attention_2",), "supports_flash": False},
            "cannot do what the model's masks or biases need",
        ),
        ("sdpa", {"soft_caps": True}, "cannot cap attention scores, which the model needs; use True or False"),
    ],
)
def test_a_named_backend_that_cannot_be_is_refused(request_: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _choose(request_, **changes)


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (("cuda", BF16, 64, True, False), False),
        (("cuda", BF16, 64, True, True), True),
        (("cuda", torch.float64, 64, False, False), True),
        (("cuda", BF16, 512, False, False), True),
        (("cuda", BF16, 64, False, False, 0.1), False),
        (("cpu", FP32, 64, True, False), False),
        (("cpu", FP32, 64, True, True), True),
        (("cpu", FP32, 64, False, False, 0.1), True),
    ],
)
def test_plain_kernels_have_a_reason(arguments: tuple, slow: bool) -> None:
    assert bool(slow_reason(*arguments)) == slow


def _loss(model: nn.Module, family: str) -> torch.Tensor:
    members = FAMILIES[family]
    batch = members.batch(members.main_head, 0, 6, torch.float32)
    # Padding on the right alone: what kernels find for a query that sees nothing at all is not defined.
    return model(**{key: value[::2].contiguous() for key, value in batch.items()}).loss


@pytest.mark.parametrize("family", ["bert", "llama", "mistral", "qwen3", "t5", "bart", "vit", "gemma3"])
@distributed(2)
def test_the_switch_changes_no_number(family: str) -> None:
    """Padding, causal, windowed, cross-attention and grouped heads; relative biases with gradients (T5)."""
    native = FAMILIES[family].build(FAMILIES[family].main_head, torch.float32)
    native.set_attn_implementation("eager")
    sharded, _ = ShardFormer(ShardConfig(enable_flash_attention=True)).optimize(copy.deepcopy(native))
    expected, found = _loss(native, family), _loss(sharded, family)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    found.backward()
    norms = {name: param.grad for name, param in native.named_parameters() if "norm" in name.lower()}
    for name, param in sharded.named_parameters():
        if name in norms and norms[name] is not None and getattr(param, "grad_group", None) is None:
            torch.testing.assert_close(param.grad, norms[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bloom", "keeps its own attention: it is written out in the model's modules"),
        ("gemma2", "keeps its own attention: its attention scores are soft-capped"),
    ],
)
@pytest.mark.usefixtures("two_fake_ranks")
def test_a_family_that_cannot_is_logged(family: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    backends.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        ShardFormer(ShardConfig(enable_flash_attention=True)).optimize(FAMILIES[family].build("causal_lm"))
    assert message in caplog.text
