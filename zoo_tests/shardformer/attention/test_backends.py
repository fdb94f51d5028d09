"""Attention backends: which one a model gets, what is refused, and that a slow kernel is never silent.

GPU routes are decided by pure functions, so that they are tested without one. What breaks here first: a release of
transformers that hands masks or biases to kernels in another way.
"""

from __future__ import annotations

import copy
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardformer import ShardConfig, ShardFormer
from shardformer.attention import backend, use_backend, use_sharded_attention
from shardformer.attention.backend import (
    FLASH_2,
    FLASH_3,
    FLASH_4,
    SDPA,
    AttentionNeeds,
    Choice,
    choose_backend,
    is_installed,
    reason_not_usable,
    slow_reason,
)
from shardformer.attention.registry import needs_of
from zoo_tests.harness.kernel_packages import flash_attn, xformers
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)


def _choose(request: bool | str = True, installed: tuple[str, ...] = (), **changes: Any) -> Choice:
    needs: dict[str, Any] = {"supports_flash": True, "supports_sdpa": True, "device": "cuda", "dtype": BF16} | changes
    return choose_backend(
        request, AttentionNeeds(**needs), lambda name: name in (*installed, "sdpa"), not_usable=lambda name: ""
    )


def test_the_fastest_that_fits_is_chosen() -> None:
    both = ("flash_attention_3", "flash_attention_2")
    assert _choose(installed=both).implementation == "flash_attention_3"
    assert _choose(installed=both[1:]).implementation == "flash_attention_2"
    assert _choose().implementation == SDPA
    assert _choose(installed=both, dtype=FP32).implementation == SDPA
    assert _choose(installed=both, device="cpu").implementation == SDPA
    assert _choose(installed=both, supports_flash=False).implementation == SDPA
    assert _choose(installed=both, soft_caps=True).implementation == "flash_attention_3"


@pytest.mark.parametrize(
    ("changes", "chosen", "reason"),
    [
        ({"capability": HOPPER}, FLASH_3, ""),
        ({"capability": AMPERE}, FLASH_2, "flash_attention_3 needs a GPU of compute capability 9.0 (Hopper), not 8.0"),
        ({"capability": BLACKWELL}, FLASH_2, "flash_attention_3 needs a GPU of compute capability 9.0"),
        ({"capability": (7, 5), "dtype": FP16}, SDPA, "flash_attention_2 needs a GPU of compute capability 8.0"),
        ({"dropout": 0.1}, FLASH_2, "flash_attention_3 has no dropout, and the model drops attention weights"),
        ({"dropout": 0.1, "soft_caps": True}, None, "flash_attention_2 cannot both cap scores and drop"),
        ({"head_dims": (64, 100)}, FLASH_2, "flash_attention_3 takes head sizes that 8 divides, not 100"),
        ({"head_dims": (320,)}, SDPA, "flash_attention_2 takes head sizes up to 256, not 320"),
        ({"head_dims": (256,), "capability": ADA}, FLASH_2, "flash_attention_3 needs a GPU"),
        ({"head_dims": (256,), "capability": ADA, "dropout": 0.1}, SDPA, "flash_attention_2 has no backward pass for"),
        ({"head_dims": (256,), "capability": AMPERE, "dropout": 0.1}, FLASH_2, "flash_attention_3 needs a GPU"),
        ({"dtype": FP32}, SDPA, "flash_attention_2 runs on GPUs in 16 bit, not on cuda in torch.float32"),
        ({"supports_flash": False}, SDPA, "flash_attention_2 cannot do what the model's masks or biases need"),
        ({"flash_kernels": ("kernels-community/x",), "supports_sdpa": False}, None, "transformers has no SDPA path"),
        ({"device": "cpu"}, SDPA, ""),
    ],
)
def test_a_kernel_that_does_not_serve_is_passed_over_with_a_reason(
    changes: dict[str, Any], chosen: str | None, reason: str
) -> None:
    found = _choose(installed=(FLASH_3, FLASH_2), **changes)
    assert found.implementation == chosen
    assert (reason in found.reason) if reason else not found.reason


@pytest.mark.parametrize(
    ("changes", "chosen", "reason"),
    [
        ({"capability": BLACKWELL, "head_dims": (128,)}, FLASH_4, "flash_attention_3 needs a GPU"),
        ({"capability": HOPPER}, FLASH_3, ""),
        ({"capability": AMPERE}, FLASH_2, "flash_attention_4 needs a GPU of compute capability 9.0 (Hopper) or more"),
        ({"capability": BLACKWELL, "head_dims": (256,)}, FLASH_2, "takes head sizes 64, 96, 128, not 256"),
        ({"capability": BLACKWELL, "dropout": 0.1}, FLASH_2, "flash_attention_4 has no dropout"),
        ({"capability": BLACKWELL, "soft_caps": True}, FLASH_2, "no backward pass for soft-capped scores"),
    ],
)
def test_flash_attention_4_has_its_own_limits(changes: dict[str, Any], chosen: str, reason: str) -> None:
    found = _choose(installed=(FLASH_4, FLASH_3, FLASH_2), **changes)
    assert found.implementation == chosen and reason in found.reason


def test_a_module_of_another_distribution_is_not_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both flash-attn 2 and 4 have a module `flash_attn`."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert is_installed(FLASH_2) and not is_installed(FLASH_4)
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda name: iter([name]))
    assert is_installed(FLASH_4)


def test_a_package_that_cannot_be_used_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built for another torch: importing it fails. Of a version that transformers refuses: it would ask the hub."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    broken = reason_not_usable(FLASH_2)
    assert broken.startswith("cannot be imported (") and f"install a build for torch {torch.__version__}" in broken
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    assert reason_not_usable(FLASH_2) == "is no version that transformers takes"
    needs = AttentionNeeds(supports_flash=True, supports_sdpa=True, device="cuda", dtype=BF16)
    found = choose_backend(True, needs, lambda name: name == FLASH_2, lambda name: broken)
    assert found == Choice(SDPA, f"{FLASH_2} {broken}")
    with pytest.raises(ValueError, match="enable_flash_attention='flash_attention_2' cannot be imported"):
        choose_backend(FLASH_2, needs, lambda name: name == FLASH_2, lambda name: broken)
    with xformers():
        assert reason_not_usable("xformers") == ""
    with xformers(has_kernels=False):
        assert reason_not_usable("xformers").startswith("has no kernels that load here")


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.attention_dropout))
def test_the_dropout_of_every_family_is_found(family: str) -> None:
    members = FAMILIES[family]
    model = members.build(members.main_head, torch.float32, **{members.attention_dropout: 0.375})
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    found = [needs_of(model, each, [], torch.device("cpu"), BF16, trains=True).dropout for each in configs.values()]
    assert max(found) == 0.375
    assert needs_of(model, model.config, [], torch.device("cpu"), BF16, trains=False).dropout == 0.0


def test_needs_of_a_model() -> None:
    model = FAMILIES["gemma2"].build("causal_lm")
    attentions = [module for module in model.modules() if type(module).__name__ == "Gemma2Attention"]
    needs = needs_of(model, model.config, attentions, torch.device("cuda"), BF16, trains=True)
    assert needs.soft_caps and needs.supports_flash and needs.head_dims == (attentions[0].head_dim,)
    assert needs_of(model, model.config, [], torch.device("cuda"), BF16, True).head_dims == (model.config.head_dim,)


def test_sinks_run_on_the_kernel_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    """GPT-OSS: flash-attn 2 and 3 would leave out its sinks without a word, and so would SDPA."""
    backend._log_once.cache_clear()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 8}
    config = transformers.GptOssConfig(**sizes, intermediate_size=8, num_hidden_layers=1, num_local_experts=2)
    model = transformers.GptOssForCausalLM(config)
    with flash_attn(2, 3):
        use_backend(model, True, torch.device("cuda"), BF16)
    assert model.config._attn_implementation == "flash_varlen"
    assert "runs flash_varlen: flash_attention_3 cannot do" in caplog.text
    with pytest.raises(ValueError, match="'sdpa' cannot do what the model's attention needs"):
        use_backend(model, "sdpa", torch.device("cuda"), BF16)
    use_backend(model, True, torch.device("cuda"), torch.float32)
    assert "keeps its own attention: transformers has no SDPA path for it" in caplog.text


def test_towers_keep_kernels_of_their_own() -> None:
    """Setting the name in an outer configuration sets it in those inside."""
    model = FAMILIES["clip"].build(FAMILIES["clip"].main_head)
    model.config.vision_config._attn_implementation = "eager"
    use_sharded_attention(model, 0)
    assert model.config.text_config._attn_implementation == "sharded_sdpa"
    assert model.config.vision_config._attn_implementation == "sharded_eager"


def test_the_device_is_that_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in the machine does not mean that the model runs on it: the plugin says, or else the process group."""
    parameter = torch.empty(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert ShardConfig(device=torch.device("cpu")).device_of(parameter) == torch.device("cpu")
    assert ShardConfig().device_of(parameter) == torch.device("cuda", 1), "there is no process group"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for each, expected in (("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")):
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group, each=each: each)
        assert ShardConfig().device_of(parameter).type == expected


def test_what_no_backend_can_do_keeps_its_own_attention_with_a_reason() -> None:
    assert _choose(soft_caps=True) == Choice(None, _choose(soft_caps=True).reason) and _choose(soft_caps=True).reason
    assert _choose(supports_sdpa=False, supports_flash=False).reason == "transformers has no SDPA path for it"
    varlen = ("flash_varlen",)  # runs rows without documents by SDPA
    assert _choose(installed=varlen, supports_sdpa=False).implementation is None
    assert _choose(installed=varlen, supports_sdpa=False, has_sinks=True).implementation == "flash_varlen"


@pytest.mark.parametrize(
    ("request_", "changes", "message"),
    [
        ("flash", {}, "'flash' is not an attention backend; use True, False or one of flash_attention_3"),
        ("flash_attention_2", {}, "needs the package flash_attn, which is not installed; use True or 'sdpa'"),
        ("xformers", {}, "needs the package xformers, which is not installed"),
        ("xformers", {"installed": ("xformers",), "device": "cpu"}, "runs on GPUs in fp32, fp16 or bf16, not on cpu"),
        ("xformers", {"installed": ("xformers",), "head_dims": (20,)}, "head sizes that 8 divides in torch.bfloat16"),
        ("xformers", {"installed": ("xformers",), "capability": (7, 5)}, "capability 8.0 .Ampere. or more for bf16"),
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
        ("sdpa", {"supports_sdpa": False}, "cannot do what the model's attention needs; use True or False"),
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
        (("cuda", BF16, 64, False, False, 0.0, (7, 5)), True),
        (("cuda", FP16, 64, False, False, 0.0, (7, 5)), False),
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
        ("gpt_neo", "keeps its own attention: it is written out in the model's modules"),
        ("gemma2", "keeps its own attention: its attention scores are soft-capped"),
    ],
)
@pytest.mark.usefixtures("two_fake_ranks")
def test_a_family_that_cannot_is_logged(family: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    backend._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        ShardFormer(ShardConfig(enable_flash_attention=True)).optimize(FAMILIES[family].build("causal_lm"))
    assert message in caplog.text
